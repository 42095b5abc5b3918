"""Rollout: responses sampled from the policy, with the log-probabilities they were drawn with."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.rollout.cache_room import check_cache
    from ratoon.rollout.config import RolloutConfig
    from ratoon.rollout.engine import RolloutEngine
    from ratoon.rollout.errors import RolloutError, RolloutStalledError
    from ratoon.rollout.factory import build_engine, check_engine
    from ratoon.rollout.model_checks import check_model
    from ratoon.rollout.notes import engine_notes

_HOMES = {
    "RolloutConfig": "config",
    "RolloutEngine": "engine",
    "RolloutError": "errors",
    "RolloutStalledError": "errors",
    "build_engine": "factory",
    "check_cache": "cache_room",
    "check_engine": "factory",
    "check_model": "model_checks",
    "engine_notes": "notes",
}

__all__ = [
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "RolloutStalledError",
    "build_engine",
    "check_cache",
    "check_engine",
    "check_model",
    "engine_notes",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
