"""What the help of each benchmark shows: examples one can read, and every name that the benchmark takes."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import get_args

import pytest

from ratoon.cli.bench_names import NAMES
from ratoon.cli.main import main

BENCHES = (
    *("policy-update", "attention", "planner", "sequence-parallel", "prefix-once", "weak-scaling", "rollout"),
    "memory",
)


def help_of(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def expanded(patterns: Iterable[str]) -> list[str]:
    """As a shell expands braces."""
    names: list[str] = []
    for pattern in patterns:
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        names += map("".join, itertools.product(*parts))
    return names


@pytest.mark.parametrize("bench", sorted(NAMES))
def test_the_names_shown_are_those_of_the_benchmark_s_tables(bench: str):
    from ratoon.bench import memory, prefix_once, rollout, sequence_parallel, weak_scaling
    from ratoon.bench.attention import candidates, peers
    from ratoon.bench.attention import cases as attention_cases
    from ratoon.bench.policy_update import cases as update_cases
    from ratoon.bench.policy_update import variants

    cases, impls, others, ways = {
        "policy-update": (update_cases.CASES, variants.OUR_VARIANTS, variants.PEER_VARIANTS, ()),
        "attention": (attention_cases.CASES, candidates.OUR_IMPLS, peers.PEERS, ()),
        "sequence-parallel": (sequence_parallel.CASES, (), (), ()),
        "prefix-once": (prefix_once.CASES, (), (), ()),
        "weak-scaling": (weak_scaling.CASES, (), (), weak_scaling.WAYS),
        "rollout": (rollout.CASES, rollout.OURS, rollout.PEERS, get_args(rollout.Way)),
        "memory": (memory.CASES, (), (), ()),
    }[bench]
    names = NAMES[bench]
    assert list(names.gpu_cases) == [case.name for case in cases.values() if case.needs_gpu]
    assert list(names.small_cases) == [case.name for case in cases.values() if not case.needs_gpu]
    assert expanded(names.impls) == list(impls)
    assert expanded(names.peers) == list(others)
    assert expanded(names.ways) == list(ways)


@pytest.mark.parametrize("bench", BENCHES)
def test_a_help_shows_every_name_unbroken_and_its_own_examples(bench: str, capsys: pytest.CaptureFixture[str]):
    shown = help_of(["bench", bench], capsys)
    words = [word.rstrip(",") for word in shown.split()]
    if bench in NAMES:
        names = NAMES[bench]
        for name in (*names.gpu_cases, *names.small_cases, *names.impls, *names.peers, *names.ways):
            assert name in words, name
    else:
        assert "--cases" not in shown, "a benchmark with names has to list them"
    examples = re.findall(r"(?:ratoon|ratoon\.cli\.main) bench (\S+) .*", shown.partition("\nexample")[2])
    assert examples and set(examples) == {bench}
    assert max(map(len, shown.splitlines())) <= 120


def test_the_help_of_all_has_one_example_of_each_and_says_where_names_are(capsys: pytest.CaptureFixture[str]):
    examples = help_of(["bench"], capsys).partition("\nexample")[2]
    commands, _, rest = examples.partition("\n\n")
    assert re.findall(r"bench (\S+)", commands) == list(BENCHES)
    assert "ratoon bench NAME --help" in rest and "--results" not in rest


@pytest.mark.parametrize("bench", BENCHES)
def test_no_help_waits_for_torch(bench: str):
    program = (
        "import sys\nfrom ratoon.cli.main import main\n"
        f"try:\n    main(['bench', {bench!r}, '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
