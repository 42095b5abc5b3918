"""The recipe: one frozen model of everything a run may be told, read from TOML and the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.config.evaluation import EvaluationConfig
    from ratoon.config.loading import load_recipe, parse_overrides
    from ratoon.config.recipe import Recipe, RunConfig
    from ratoon.config.stop import StopConfig

_HOMES = {
    "EvaluationConfig": "evaluation",
    "Recipe": "recipe",
    "RunConfig": "recipe",
    "StopConfig": "stop",
    "load_recipe": "loading",
    "parse_overrides": "loading",
}

__all__ = ["EvaluationConfig", "Recipe", "RunConfig", "StopConfig", "load_recipe", "parse_overrides"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
