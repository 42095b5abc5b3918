"""The whole objective of one microbatch: policy loss, entropy, KL, corrected for the rollout engine's numerics."""

# Shape letters: M scored tokens of one microbatch, N sequences.

from dataclasses import dataclass

from torch import Tensor

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.algorithms.kl import KlLoss, kl_loss
from ratoon.algorithms.losses import PolicyLoss, entropy_bonus, policy_loss
from ratoon.algorithms.mismatch import Correction, MismatchSums, mismatch_correction, mismatch_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTokens:
    """What the objective needs at each scored token; all on one device."""

    policy_logprobs_M: Tensor
    """[M] under the current weights, with graph."""

    entropy_M: Tensor
    """[M] nats, with graph."""

    old_logprobs_M: Tensor
    """[M] under the weights at the step's start."""

    advantages_M: Tensor
    loss_weights_M: Tensor
    """[M] from `aggregation`; 0 marks a token that is not trained on."""

    sequence_of_M: Tensor
    """[M] integers: which response of the microbatch."""

    num_sequences: int
    """N, responses without scored tokens included."""

    rollout_logprobs_M: Tensor | None = None
    """[M] as the engine reported them; None where it did not."""

    ref_logprobs_M: Tensor | None = None
    """[M] under the reference model; None without a KL term in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """The scalar to minimise, and its parts for logging."""

    loss: Tensor
    """0-D; sums over microbatches and ranks to the step's objective."""

    policy: PolicyLoss
    kl: KlLoss | None
    mismatch: MismatchSums | None
    correction: Correction | None


def microbatch_objective(config: AlgorithmConfig, tokens: ScoredTokens) -> Objective:
    """policy loss - entropy_coefficient · entropy + kl_coefficient · KL, each with the step's weights.

    A mismatch correction multiplies the policy loss of each token, and neither entropy nor KL. Its factors are not
    negative, so they may stand at the advantages.
    """
    old_logprobs_M, weights_M = tokens.old_logprobs_M, tokens.loss_weights_M
    advantages_M = tokens.advantages_M
    sums = correction = kl = None
    if tokens.rollout_logprobs_M is not None:
        sums = mismatch_sums(old_logprobs_M, tokens.rollout_logprobs_M, weights_M)
    if config.needs_rollout_logprobs:
        assert tokens.rollout_logprobs_M is not None, f"{config.mismatch_correction} needs the engine's log-probs"
        correction = mismatch_correction(
            config,
            old_logprobs_M,
            tokens.rollout_logprobs_M,
            weights_M,
            tokens.sequence_of_M,
            num_sequences=tokens.num_sequences,
        )
        advantages_M = advantages_M * correction.factor_M
    policy = policy_loss(
        config,
        tokens.policy_logprobs_M,
        old_logprobs_M,
        advantages_M,
        weights_M,
        tokens.sequence_of_M,
        num_sequences=tokens.num_sequences,
    )
    loss = policy.loss
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy_bonus(tokens.entropy_M, weights_M)
    if config.kl_in == "loss":
        assert tokens.ref_logprobs_M is not None and config.kl_estimator is not None, "a KL term needs a reference"
        kl = kl_loss(tokens.policy_logprobs_M, tokens.ref_logprobs_M, weights_M, estimator=config.kl_estimator)
        loss = loss + config.kl_coefficient * kl.loss
    return Objective(loss=loss, policy=policy, kl=kl, mismatch=sums, correction=correction)
