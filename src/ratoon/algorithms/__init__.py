"""What is optimised: pure functions on [N] rewards and [M] scored tokens, each citing its paper.

`advantages` compares rewards, `aggregation` gives every scored token its share of the step's mean, `losses`, `kl` and
`mismatch` turn log-probs into scalars, `objective` adds them up as `config` says. A further algorithm is a function in
one of these and a row in `config`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.algorithms.advantages import (
        are_equal,
        grpo_advantages,
        reinforce_advantages,
        reinforce_baseline_advantages,
        rloo_advantages,
        step_advantages,
    )
    from ratoon.algorithms.aggregation import constant_weights, sequence_mean_weights, token_mean_weights
    from ratoon.algorithms.config import AlgorithmConfig, AlgorithmName
    from ratoon.algorithms.kl import KlLoss, kl_estimates, kl_loss
    from ratoon.algorithms.losses import (
        PolicyLoss,
        cispo_policy_loss,
        clipped_policy_loss,
        entropy_bonus,
        gspo_policy_loss,
        policy_loss,
        supervised_loss,
    )
    from ratoon.algorithms.mismatch import Correction, MismatchSums, mismatch_correction, mismatch_sums
    from ratoon.algorithms.objective import Objective, ScoredTokens, microbatch_objective
    from ratoon.algorithms.shaping import soft_overlong_penalty

_HOMES = {
    "AlgorithmConfig": "config",
    "AlgorithmName": "config",
    "Correction": "mismatch",
    "KlLoss": "kl",
    "MismatchSums": "mismatch",
    "Objective": "objective",
    "PolicyLoss": "losses",
    "ScoredTokens": "objective",
    "are_equal": "advantages",
    "cispo_policy_loss": "losses",
    "clipped_policy_loss": "losses",
    "constant_weights": "aggregation",
    "entropy_bonus": "losses",
    "grpo_advantages": "advantages",
    "gspo_policy_loss": "losses",
    "kl_estimates": "kl",
    "kl_loss": "kl",
    "microbatch_objective": "objective",
    "mismatch_correction": "mismatch",
    "mismatch_sums": "mismatch",
    "policy_loss": "losses",
    "reinforce_advantages": "advantages",
    "reinforce_baseline_advantages": "advantages",
    "rloo_advantages": "advantages",
    "sequence_mean_weights": "aggregation",
    "soft_overlong_penalty": "shaping",
    "step_advantages": "advantages",
    "supervised_loss": "losses",
    "token_mean_weights": "aggregation",
}

__all__ = [
    "AlgorithmConfig",
    "AlgorithmName",
    "Correction",
    "KlLoss",
    "MismatchSums",
    "Objective",
    "PolicyLoss",
    "ScoredTokens",
    "are_equal",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "constant_weights",
    "entropy_bonus",
    "grpo_advantages",
    "gspo_policy_loss",
    "kl_estimates",
    "kl_loss",
    "microbatch_objective",
    "mismatch_correction",
    "mismatch_sums",
    "policy_loss",
    "reinforce_advantages",
    "reinforce_baseline_advantages",
    "rloo_advantages",
    "sequence_mean_weights",
    "soft_overlong_penalty",
    "step_advantages",
    "supervised_loss",
    "token_mean_weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
