"""What a run prints."""

from collections.abc import Sequence

from ratoon.bench.attention.cases import AttentionCase
from ratoon.bench.rows import BenchRow

_RATIO_PEERS = ("fa4", "fa2")

LABEL_WIDTH = 22
"""Of a candidate's name, in its line."""


def floors_line(case: AttentionCase, matmul_tflops: float, copy_tb_per_s: float, element_size: int) -> str:
    """A case's heading: its size, and the two floors of each direction."""
    floors_ms = case.floors_ms(matmul_tflops=matmul_tflops, copy_tb_per_s=copy_tb_per_s, element_size=element_size)
    floors = "; ".join(
        f"{direction} {flops_ms:.4g} ms by FLOPs, {bytes_ms:.3g} ms by bytes"
        for direction, (flops_ms, bytes_ms) in floors_ms.items()
    )
    window = "" if case.window is None else f", window {case.window}"
    return (
        f"{case.name}: {case.layout.num_rows:,} rows, dedup {case.layout.dedup_ratio:.2f}, H {case.H}/{case.Hkv}, "
        f"d {case.D}{window}; floors: {floors}"
    )


def measured_line(row: BenchRow) -> str:
    """One candidate, as soon as it is measured."""
    figures = row.figures
    name = f"{row.impl} (peer)" if row.peer else row.impl
    speeds = "  ".join(
        f"{direction} {figures[f'{direction}_ms']:.4g} ms "
        f"(p20 {figures[f'{direction}_p20_ms']:.4g}, p80 {figures[f'{direction}_p80_ms']:.4g})"
        for direction in ("fwd", "bwd")
    )
    return (
        f"  {name:<{LABEL_WIDTH}} {speeds}  error: largest {figures['max_error']:.2g}, RMS {figures['rms_error']:.2g} "
        f"(eager {figures['max_error_eager']:.2g}, {figures['rms_error_eager']:.2g})"
    )


def end_table(rows: Sequence[BenchRow]) -> str:
    """All rows by case: time, useful TFLOP/s and their share of the matrix product's rate in each direction, and how
    many times faster than a peer forward and backward are together."""
    lines = [
        f"{'case':<32}{'impl':<20}{'fwd ms':>9}{'TFLOP/s':>9}{'of m':>6}{'bwd ms':>9}{'TFLOP/s':>9}{'of m':>6}"
        + "".join(f"{'x ' + peer:>8}" for peer in _RATIO_PEERS)
        + f"{'GiB':>7}"
    ]
    of_case: dict[str, list[BenchRow]] = {}
    for row in rows:
        of_case.setdefault(str(row.figures["case_name"]), []).append(row)
    for case_name, case_rows in of_case.items():
        peer_ms = {row.impl: _total_ms(row) for row in case_rows if row.peer}
        for row in case_rows:
            figures = row.figures
            name = f"{row.impl} (peer)" if row.peer else row.impl
            speeds = "".join(
                f"{figures[f'{direction}_ms']:>9.3f}{figures[f'useful_tflops_{direction}']:>9.3g}"
                f"{figures[f'{direction}_of_matmul']:>6.2f}"
                for direction in ("fwd", "bwd")
            )
            ratios = "".join(
                f"{peer_ms[peer] / _total_ms(row):>8.2f}" if peer in peer_ms else f"{'-':>8}" for peer in _RATIO_PEERS
            )
            peak = figures["peak_extra_gib"]
            gib = f"{'-':>7}" if peak is None else f"{peak:>7.2f}"
            lines.append(f"{case_name:<32}{name:<20}{speeds}{ratios}{gib}")
    return "\n".join(lines)


def _total_ms(row: BenchRow) -> float:
    """Forward and backward."""
    return float(row.figures["fwd_ms"] or 0.0) + float(row.figures["bwd_ms"] or 0.0)
