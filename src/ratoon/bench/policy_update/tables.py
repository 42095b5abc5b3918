"""What a run prints."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from ratoon.bench.policy_update.cases import UpdateCase
from ratoon.bench.policy_update.variants import PEERS_TODAY
from ratoon.bench.rows import BenchRow

LABEL_WIDTH = 32
"""Of a variant's name, in lines and in the table."""


def case_line(case: UpdateCase, model: PreTrainedModel, flops: float) -> str:
    """A case's heading."""
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    rows = case.P + case.N * case.R
    return (
        f"{case.name}: {case.decoder.name}, {billions:.3g} billion random weights, {rows:,} rows, dedup "
        f"{case.N * (case.P + case.R) / rows:.2f}, useful work {flops / 1e12:.4g} TFLOP"
    )


def measured_line(row: BenchRow) -> str:
    """One variant, as soon as it is measured."""
    figures = row.figures
    name = f"{figures['variant']} (peer)" if row.peer else figures["variant"]
    mfu, peak, optimizer_s = figures.get("useful_mfu"), figures["peak_gib"], figures["optimizer_s"]
    return (
        f"  {name:<{LABEL_WIDTH}} {figures['step_s']:.4g} s "
        f"({figures['step_min_s']:.4g} to {figures['step_max_s']:.4g})"
        + ("" if mfu is None else f"  useful MFU {mfu:.3f}")
        + ("" if peak is None else f"  {peak:.1f} GiB")
        + ("" if optimizer_s is None else f"  optimizer {optimizer_s:.3g} s")
        + f"  first call {figures['first_call_s']:.3g} s  gradients out by {figures['slice_gradient_gap']:.2g}"
    )


def end_table(rows: Sequence[BenchRow]) -> str:
    """All rows by case. `x today`: how many times faster than what most users run. `x FA4`: than replicated FA4 under
    the row's own settings, and as a share of the FLOP ratio."""
    lines = [
        f"{'case':<28}{'variant':<32}{'step s':>9}{'MFU':>7}{'GiB':>7}{'logical/s':>11}"
        f"{'x today':>9}{'x FA4':>8}{'of FLOPs':>10}"
    ]
    for row in rows:
        figures = row.figures
        case_name, step_s = figures["case_name"], float(figures["step_s"] or 0.0)
        seconds = {
            other.figures["variant"]: float(other.figures["step_s"] or 0.0)
            for other in rows
            if other.figures["case_name"] == case_name
        }
        setting = str(figures["variant"]).partition("/")[2]
        today_s, fa4_s = seconds.get(PEERS_TODAY), seconds.get(f"fa4/{setting}")
        times_fa4 = None if fa4_s is None else fa4_s / step_s
        mfu, peak = figures.get("useful_mfu"), figures["peak_gib"]
        name = f"{figures['variant']} (peer)" if row.peer else figures["variant"]
        lines.append(
            f"{case_name:<28}{name:<{LABEL_WIDTH}}{step_s:>9.4g}"
            f"{_cell(mfu, 7, '.3f')}{_cell(peak, 7, '.1f')}{figures['logical_tokens_per_s']:>11,.0f}"
            f"{_cell(None if today_s is None else today_s / step_s, 9, '.2f')}{_cell(times_fa4, 8, '.2f')}"
            f"{_cell(None if times_fa4 is None else times_fa4 / float(figures['flop_ratio'] or 1.0), 10, '.2f')}"
        )
    return "\n".join(lines)


def _cell(value: float | int | str | bool | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"
