"""What a run measured: one JSON object a line, and where its seconds went."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.metrics.metrics_log import MetricsLog
    from ratoon.metrics.phase_clock import PhaseClock
    from ratoon.metrics.rows import MetricsRow, read_metrics

_HOMES = {
    "MetricsLog": "metrics_log",
    "MetricsRow": "rows",
    "PhaseClock": "phase_clock",
    "read_metrics": "rows",
}

__all__ = ["MetricsLog", "MetricsRow", "PhaseClock", "read_metrics"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
