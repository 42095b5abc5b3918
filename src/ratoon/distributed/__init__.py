"""Sums and broadcasts between the processes that train one model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.distributed.data_parallel import CollectiveError, DataParallel
    from ratoon.distributed.launch import from_environment, single_process

_HOMES = {
    "CollectiveError": "data_parallel",
    "DataParallel": "data_parallel",
    "from_environment": "launch",
    "single_process": "launch",
}

__all__ = ["CollectiveError", "DataParallel", "from_environment", "single_process"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
