"""`ratoon bench`."""

import argparse
import shlex
import sys
from pathlib import Path

from ratoon.bench.policy_update import PolicyUpdateCase, bench_policy_update
from ratoon.bench.rows import append_rows
from ratoon.models import load_policy


def bench(known: argparse.Namespace) -> int:
    """Runs one benchmark, prints its table, and appends its rows to `--results` if given."""
    case = PolicyUpdateCase(model=_model_name(known), P=known.prompt, R=known.response, N=known.group_size)
    model = load_policy(known.model, gguf_file=known.gguf_file)
    command = shlex.join(["ratoon", *sys.argv[1:]])
    rows = bench_policy_update(model, case, repeats=known.repeats, command=command)
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
