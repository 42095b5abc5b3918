"""What a run measured: one JSON object a line, where its seconds went, and copies of it in other tools."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.metrics.metrics_log import MetricsLog
    from ratoon.metrics.phase_clock import PhaseClock
    from ratoon.metrics.rows import MetricsRow, read_metrics
    from ratoon.metrics.sinks import Sinks, check_sinks

_HOMES = {
    "MetricsLog": "metrics_log",
    "MetricsRow": "rows",
    "PhaseClock": "phase_clock",
    "Sinks": "sinks",
    "check_sinks": "sinks",
    "read_metrics": "rows",
}

__all__ = ["MetricsLog", "MetricsRow", "PhaseClock", "Sinks", "check_sinks", "read_metrics"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
