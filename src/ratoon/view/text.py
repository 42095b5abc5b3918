"""Numbers, durations and small bars as text."""

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"


def duration(seconds: float) -> str:
    """`4.2s`, `3m 20s`, `2h 05m`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], *, width: int, ascii_only: bool) -> str:
    """The last `width` finite values as bars between their own least and largest."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite:
        return ""
    bars = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(finite), max(finite)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in finite)


def bar(fraction: float, *, width: int, ascii_only: bool) -> str:
    """`fraction` of `width` filled, the rest empty."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


def key_values(**values: float | None) -> str:
    """`key=value` pairs parted by blanks, for grep and awk; None is left out."""
    return " ".join(f"{key}={_number(value)}" for key, value in values.items() if value is not None)


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
