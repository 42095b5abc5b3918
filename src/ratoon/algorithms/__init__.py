"""What is optimised: pure functions on [N] rewards and [M] scored tokens, each citing its paper.

`advantages` compares the rewards of one group, `aggregation` gives every scored token its share of
the step's mean, `losses` turns log-probs into a scalar, `config` names the choice. A further
algorithm is a function in the first three and a row in `config`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.algorithms.advantages import grpo_advantages
    from ratoon.algorithms.aggregation import sequence_mean_weights, token_mean_weights
    from ratoon.algorithms.config import AlgorithmConfig
    from ratoon.algorithms.losses import PolicyLoss, clipped_policy_loss, entropy_bonus, supervised_loss
    from ratoon.algorithms.shaping import soft_overlong_penalty

_HOMES = {
    "AlgorithmConfig": "config",
    "PolicyLoss": "losses",
    "clipped_policy_loss": "losses",
    "entropy_bonus": "losses",
    "grpo_advantages": "advantages",
    "sequence_mean_weights": "aggregation",
    "soft_overlong_penalty": "shaping",
    "supervised_loss": "losses",
    "token_mean_weights": "aggregation",
}

__all__ = [
    "AlgorithmConfig",
    "PolicyLoss",
    "clipped_policy_loss",
    "entropy_bonus",
    "grpo_advantages",
    "sequence_mean_weights",
    "soft_overlong_penalty",
    "supervised_loss",
    "token_mean_weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
