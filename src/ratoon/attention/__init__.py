"""Attention over a forest of segments: every row reads its own path, and each shared prompt is read once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.attention.dispatch import forest_attention
    from ratoon.attention.impls import ImplChoice, ImplStatus, available_impls, explain_choice, resolve_impl
    from ratoon.attention.plan import AttentionPlan
    from ratoon.attention.request import AttentionRequest

_HOMES = {
    "AttentionPlan": "plan",
    "AttentionRequest": "request",
    "ImplChoice": "impls",
    "ImplStatus": "impls",
    "available_impls": "impls",
    "explain_choice": "impls",
    "forest_attention": "dispatch",
    "resolve_impl": "impls",
}

__all__ = [
    "AttentionPlan",
    "AttentionRequest",
    "ImplChoice",
    "ImplStatus",
    "available_impls",
    "explain_choice",
    "forest_attention",
    "resolve_impl",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
