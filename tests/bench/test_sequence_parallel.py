"""`ratoon bench sequence-parallel`: its rows, and what it says of ranks that compute something else."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_on_ranks
from torch import Tensor

from ratoon.bench import sequence_parallel
from ratoon.bench.sequence_parallel import CASES, SLICE_GAP, bench_sequence_parallel
from ratoon.cli.main import main
from ratoon.distributed import DataParallel, SequenceGroup
from ratoon.models import interface
from ratoon.types import UserError


@pytest.mark.full
def test_rows_under_torchrun(tmp_path: Path):
    results = tmp_path / "rows.jsonl"
    root = Path(__file__).parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "ratoon.cli.main", "bench", "sequence-parallel", "--steps", "2", "--results", str(results)]
    done = subprocess.run(
        [*launch, *command],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("times as fast") == 1, "one rank speaks"
    one, two = (json.loads(line) for line in results.read_text().splitlines())
    case = CASES["tiny"]
    for row, degree in ((one, 1), (two, 2)):
        assert row["bench"] == "sequence-parallel" and row["sequence_parallel"] == degree
        assert row["case"] == {"model": "tiny-Qwen3", "P": case.P, "R": case.R, "N": case.N, "groups": 1}
        assert row["num_rows"] == 57 + 6 * 19 and row["repeats"] == 2 and row["recompute"] == "full"
        assert row["impl"] == "auto" and row["layout"] == "shared" and row["peer"] is False
        assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
        assert row["command"].startswith("torchrun --nproc-per-node 2 -m ratoon.cli.main bench sequence-parallel")
    assert two["speedup"] == pytest.approx(one["step_s"] / two["step_s"])
    assert two["slice_gradient_gap"] < 1e-9 and two["gradient_gap"] < 1e-4
    assert 0 < two["gradient_sum_s"] < two["step_s"]


def outputs_of_other_heads(out_ThE: Tensor, group: SequenceGroup) -> Tensor:
    return HONEST["gather_heads"](out_ThE, group).roll(1, dims=1)


def keys_of_other_rows(q_BHD: Tensor, k_BHD: Tensor, v_BHE: Tensor, group: SequenceGroup) -> tuple[Tensor, ...]:
    return HONEST["scatter_heads"](q_BHD, k_BHD.roll(1, dims=0), v_BHE, group)


def no_sum(ranks: DataParallel, _: Any) -> None:
    ranks.barrier()


HONEST: dict[str, Callable[..., Any]] = {
    "gather_heads": interface.gather_heads,
    "scatter_heads": interface.scatter_heads,
}
WRONG: list[tuple[object, str, Callable[..., Any]]] = [
    (interface, "gather_heads", outputs_of_other_heads),
    (DataParallel, "all_reduce_gradients", no_sum),
    (interface, "scatter_heads", keys_of_other_rows),
]


def bench_wrongly(ranks: DataParallel, folder: Path) -> list[list[str]]:
    """For each wrong way, why it failed: on the slice, and where the slice lets all through."""
    found: list[list[str]] = []
    for owner, attribute, wrong in WRONG:
        found.append([])
        for bound in (SLICE_GAP, 1e9):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, attribute, wrong)
                patch.setattr(sequence_parallel, "SLICE_GAP", bound)
                outcome = bench_sequence_parallel(
                    ranks, num_steps=1, command="", results=folder / "rows.jsonl", say=lambda _: None
                )
            found[-1] += [one.reason for one in outcome.failed]
            assert len(outcome.rows) == (0 if outcome.failed else 2)
    return found


@pytest.mark.full
def test_ranks_that_compute_something_else_get_no_time(tmp_path: Path):
    for heads, unsummed, keys in run_on_ranks(2, bench_wrongly, tmp_path):
        for reasons in (heads, unsummed):
            assert "on a slice" in reasons[0] and "at full size" in reasons[1]
        assert "on a slice" in keys[0]
        for on_slice, *_ in (heads, unsummed, keys):
            gap = re.search(r"out by (\S+) ", on_slice)
            assert gap is not None and float(gap[1]) > 10 * SLICE_GAP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "start them with torchrun --nproc-per-node 2"), (["--steps", "0"], "--steps: must be")],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    try:
        status = main(["bench", "sequence-parallel", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and message in capsys.readouterr().err


def refused_cases(ranks: DataParallel, _: Path) -> list[str]:
    messages: list[str] = []
    for cases in (["8b-cut-131072"], ["nothing"]):
        with pytest.raises(UserError) as error:
            bench_sequence_parallel(ranks, cases=cases, num_steps=1, command="")
        messages.append(str(error.value))
    return messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not too small")
def test_cases_are_named(tmp_path: Path):
    too_large, unknown = run_on_ranks(2, refused_cases, tmp_path)[1]
    assert "too large for a CPU" in too_large and "no such pack: nothing" in unknown
