"""What a response is worth: verifiers, formats, lengths, and your own functions, in workers that can be killed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.rewards.config import RewardComponent, RewardConfig
    from ratoon.rewards.extraction import extract_answer
    from ratoon.rewards.messages import Cause
    from ratoon.rewards.pool import RewardPool
    from ratoon.rewards.scored import RewardFailures, ScoredGroups

_HOMES = {
    "Cause": "messages",
    "RewardComponent": "config",
    "RewardConfig": "config",
    "RewardFailures": "scored",
    "RewardPool": "pool",
    "ScoredGroups": "scored",
    "extract_answer": "extraction",
}

__all__ = [
    "Cause",
    "RewardComponent",
    "RewardConfig",
    "RewardFailures",
    "RewardPool",
    "ScoredGroups",
    "extract_answer",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
