"""Runs: what the recipe asks for, stage by stage, from an empty folder or from where it stopped."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.loop.run import train

_HOMES = {"train": "run"}

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
