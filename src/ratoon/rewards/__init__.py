"""What a response is worth: task scorers, exact match, and your own function."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.rewards.config import RewardConfig

_HOMES = {"RewardConfig": "config"}

__all__ = ["RewardConfig"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
