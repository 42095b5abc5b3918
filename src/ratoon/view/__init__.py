"""What a person sees while a run goes on, and at its end."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.view.page import final_page
    from ratoon.view.run_log import RunLog
    from ratoon.view.run_view import RunView
    from ratoon.view.summary import RunSummary, StepReport

_HOMES = {
    "RunLog": "run_log",
    "RunSummary": "summary",
    "RunView": "run_view",
    "StepReport": "summary",
    "final_page": "page",
}

__all__ = ["RunLog", "RunSummary", "RunView", "StepReport", "final_page"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
