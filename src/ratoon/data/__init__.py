"""Prompts from files and generators, read and checked before any model loads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.data.bad_rows import find_bad_rows
    from ratoon.data.config import DataConfig, SourceConfig
    from ratoon.data.loading import PromptSplit, load_prompts
    from ratoon.data.report import DataReport, expected_dedup_ratio
    from ratoon.data.rows import SOURCE_KEY
    from ratoon.data.stream import PromptStream, StreamState
    from ratoon.data.supervised import supervised_examples

_HOMES = {
    "DataConfig": "config",
    "DataReport": "report",
    "SOURCE_KEY": "rows",
    "SourceConfig": "config",
    "expected_dedup_ratio": "report",
    "find_bad_rows": "bad_rows",
    "PromptSplit": "loading",
    "PromptStream": "stream",
    "StreamState": "stream",
    "load_prompts": "loading",
    "supervised_examples": "supervised",
}

__all__ = [
    "SOURCE_KEY",
    "DataConfig",
    "DataReport",
    "PromptSplit",
    "PromptStream",
    "SourceConfig",
    "StreamState",
    "expected_dedup_ratio",
    "find_bad_rows",
    "load_prompts",
    "supervised_examples",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
