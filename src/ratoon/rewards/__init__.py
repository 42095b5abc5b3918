"""What a response is worth: task scorers, exact match, and your own function."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.rewards.building import build_reward_fn, check_prompts
    from ratoon.rewards.config import RewardConfig
    from ratoon.rewards.extraction import extract_answer
    from ratoon.rewards.scoring import score

_HOMES = {
    "RewardConfig": "config",
    "build_reward_fn": "building",
    "check_prompts": "building",
    "extract_answer": "extraction",
    "score": "scoring",
}

__all__ = ["RewardConfig", "build_reward_fn", "check_prompts", "extract_answer", "score"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
