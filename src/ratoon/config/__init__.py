"""The recipe: one frozen model of everything a run may be told, read from TOML and the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.config.loading import load_recipe, parse_overrides
    from ratoon.config.recipe import EvaluationConfig, Recipe, RunConfig

_HOMES = {
    "EvaluationConfig": "recipe",
    "Recipe": "recipe",
    "RunConfig": "recipe",
    "load_recipe": "loading",
    "parse_overrides": "loading",
}

__all__ = ["EvaluationConfig", "Recipe", "RunConfig", "load_recipe", "parse_overrides"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
