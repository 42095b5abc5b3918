"""The data that stages hand to one another, and the protocols two stages share."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.types.errors import UserError
    from ratoon.types.model_shape import ModelShape
    from ratoon.types.protocols import WeightReceiver
    from ratoon.types.rollouts import FinishReason, Prompt, Response, RolloutGroup, SampledSupport
    from ratoon.types.sampling import SamplingParams

_HOMES = {
    "FinishReason": "rollouts",
    "ModelShape": "model_shape",
    "Prompt": "rollouts",
    "Response": "rollouts",
    "RolloutGroup": "rollouts",
    "SampledSupport": "rollouts",
    "SamplingParams": "sampling",
    "UserError": "errors",
    "WeightReceiver": "protocols",
}

__all__ = [
    "FinishReason",
    "ModelShape",
    "Prompt",
    "Response",
    "RolloutGroup",
    "SampledSupport",
    "SamplingParams",
    "UserError",
    "WeightReceiver",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
