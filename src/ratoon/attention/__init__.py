"""Attention over a forest of segments: every row reads its own path, and each shared prompt is read once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.attention.dispatch import forest_attention
    from ratoon.attention.impls import (
        AttentionRequest,
        ImplChoice,
        ImplStatus,
        available_impls,
        resolve_impl,
    )
    from ratoon.attention.plan import AttentionPlan

_HOMES = {
    "AttentionPlan": "plan",
    "AttentionRequest": "impls",
    "ImplChoice": "impls",
    "ImplStatus": "impls",
    "available_impls": "impls",
    "forest_attention": "dispatch",
    "resolve_impl": "impls",
}

__all__ = [
    "AttentionPlan",
    "AttentionRequest",
    "ImplChoice",
    "ImplStatus",
    "available_impls",
    "forest_attention",
    "resolve_impl",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
