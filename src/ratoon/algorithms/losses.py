"""Scalars to minimise, as weighted sums over the scored tokens of one microbatch.

Weights come from `aggregation` and carry every denominator; a weight of 0 marks a token that is not
trained on, and its other entries are never looked at (they may be NaN). Sums run in float32, or in
the log-probs' dtype where that is wider.
"""

# Shape letters: M scored tokens of one microbatch, N sequences.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.algorithms.sequences import sequence_means

MAX_ABS_LOG_RATIO = 20.0
"""Nats. exp(20) = 4.9e8 is far outside any clip range, and far inside float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of one microbatch, and sums for logging that add up over microbatches and ranks.

    All are 0-D tensors on the log-probs' device; none but `loss` has a graph. The sums run over loss
    tokens, each counted once whatever its weight: divide them by the step's `num_loss_tokens`.
    """

    loss: Tensor
    """Weighted sum. Sums over microbatches and ranks to the step's mean loss; differentiable."""

    num_loss_tokens: Tensor
    """Tokens with a weight other than 0."""

    num_clipped_low: Tensor
    """Tokens without gradient because the ratio (gspo: their response's) fell below 1 - clip_low (advantage < 0).
    cispo: tokens whose ratio was raised to it, with their gradient. None where the advantage is 0."""

    num_clipped_high: Tensor
    """Tokens without gradient because the ratio (gspo: their response's) rose above 1 + clip_high (advantage > 0) or
    above dual_clip (advantage < 0). cispo: tokens whose ratio was cut to it, with their gradient."""

    sum_ratio: Tensor
    """Probability ratios of single tokens, policy over old, before clipping. Their mean stays near 1."""

    sum_kl_k3: Tensor
    """Nats. ratio - 1 - log ratio, never negative: an unbiased estimate of KL(old || policy)."""

    max_abs_log_ratio: Tensor
    """Nats, before any bound. Combine by maximum, not by sum."""


def policy_loss(
    config: AlgorithmConfig,
    policy_logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    loss_weights_M: Tensor,
    sequence_of_M: Tensor,
    *,
    num_sequences: int,
) -> PolicyLoss:
    """The loss that `config.policy_loss` names, with its bounds. sequence_of_M: [M] integers below `num_sequences`."""
    vectors = (policy_logprobs_M, old_logprobs_M, advantages_M, loss_weights_M)
    if config.policy_loss == "cispo":
        return cispo_policy_loss(*vectors, clip_low=config.clip_low, clip_high=config.clip_high)
    assert config.clip_low is not None, "only cispo does without a lower bound"
    if config.policy_loss == "gspo":
        return gspo_policy_loss(
            *vectors, sequence_of_M, num_sequences=num_sequences, clip_low=config.clip_low, clip_high=config.clip_high
        )
    return clipped_policy_loss(
        *vectors, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
    )


def clipped_policy_loss(
    policy_logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    loss_weights_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-Σ weight · min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A).

    PPO clip: arXiv 1707.06347, §3, eq. 7. A `clip_high` above `clip_low` is DAPO's clip-higher:
    arXiv 2503.14476, §3.1. `dual_clip` bounds the objective of a negative advantage from below by dual_clip · A, where
    the minimum leaves it unbounded: arXiv 1912.09729 (dual-clip PPO). Per-token k3: Schulman, "Approximating KL
    divergence" (2020).

    policy_logprobs_M: [M] under the current weights, with graph. old_logprobs_M: [M] under the
    weights at the step's start. advantages_M: [M], each response's advantage at its tokens.
    loss_weights_M: [M] from `aggregation`.

    Log ratios are held within ±20 nats, so that no ratio overflows and no 0 · inf appears. Beyond
    that bound a token has no gradient; within the clip range, where learning happens, nothing changes.
    M = 0 gives a loss of 0 whose backward works.
    """
    tokens = _Tokens.of(policy_logprobs_M, old_logprobs_M, advantages_M, loss_weights_M)
    return _clipped(tokens, tokens.ratio_M(), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo_policy_loss(
    policy_logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    loss_weights_M: Tensor,
    sequence_of_M: Tensor,
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """`clipped_policy_loss` with one ratio for all tokens of a response: exp(mean of their log ratios).

    GSPO, arXiv 2507.18071, §4.1, eq. 5 to 7. The mean runs over the response's loss tokens, and the gradient through
    it: each of them moves the ratio by 1 / their number. With weights of a mean over sequences it is the paper's
    objective. sequence_of_M: [M] integers below `num_sequences`; every loss token of a response must be here.
    """
    tokens = _Tokens.of(policy_logprobs_M, old_logprobs_M, advantages_M, loss_weights_M)
    mean_M = sequence_means(tokens.log_ratio_M, tokens.is_loss_M, sequence_of_M, num_sequences=num_sequences)
    ratio_M = _bounded_exp(mean_M.to(tokens.log_ratio_M.dtype))
    return _clipped(tokens, ratio_M, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def cispo_policy_loss(
    policy_logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    loss_weights_M: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
) -> PolicyLoss:
    """-Σ weight · clip(ratio, 1 - clip_low, 1 + clip_high) · A · log-prob, with the ratio held constant.

    CISPO, arXiv 2506.13585, §3.1, eq. 4 and 5. A bounded ratio weighs the gradient of every token; none is dropped,
    however far it has moved. `clip_low` None: no lower bound, as there. The value is not that of the expected reward,
    and need not be near 0; its gradient at ratio 1 is that of the other losses.
    """
    tokens = _Tokens.of(policy_logprobs_M, old_logprobs_M, advantages_M, loss_weights_M)
    ratio_M = tokens.ratio_M().detach()
    lowest = 0.0 if clip_low is None else 1.0 - clip_low
    kept_M = ratio_M.clamp(lowest, 1.0 + clip_high)
    policy_logprobs_M = torch.where(tokens.is_loss_M, policy_logprobs_M.to(kept_M.dtype), 0.0)
    objective_M = kept_M * tokens.advantages_M * policy_logprobs_M
    has_gradient_M = tokens.advantages_M != 0
    return tokens.result(
        objective_M,
        is_low_M=(ratio_M < lowest) & has_gradient_M,
        is_high_M=(ratio_M > 1.0 + clip_high) & has_gradient_M,
    )


def entropy_bonus(entropy_M: Tensor, loss_weights_M: Tensor) -> Tensor:
    """Σ weight · entropy, in nats: the mean entropy over the step's loss tokens, once summed over it.

    Subtract `entropy_coefficient` times this from the loss to keep the policy exploring:
    arXiv 1707.06347, §5, eq. 9 (there S). entropy_M: [M] with graph.
    """
    return _weighted_sum(entropy_M, loss_weights_M)


def supervised_loss(policy_logprobs_M: Tensor, loss_weights_M: Tensor) -> Tensor:
    """-Σ weight · log-prob, in nats: cross-entropy on given tokens, for the `sft` stage.

    InstructGPT, arXiv 2203.02155, §3.1 (supervised fine-tuning). policy_logprobs_M: [M] with graph.
    """
    return -_weighted_sum(policy_logprobs_M, loss_weights_M)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Inputs of a policy loss in the dtype it is computed in, with zeros at tokens that are not trained on."""

    log_ratio_M: Tensor
    """With graph; not bounded."""

    advantages_M: Tensor
    weights_M: Tensor
    is_loss_M: Tensor

    @classmethod
    def of(
        cls, policy_logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, loss_weights_M: Tensor
    ) -> "_Tokens":
        others = (("old_logprobs", old_logprobs_M), ("advantages", advantages_M), ("weights", loss_weights_M))
        for name, other in others:
            assert other.shape == policy_logprobs_M.shape, (
                f"{name} of shape {tuple(other.shape)} for policy_logprobs of {tuple(policy_logprobs_M.shape)}"
            )
        dtype = torch.promote_types(policy_logprobs_M.dtype, torch.float32)
        is_loss_M = loss_weights_M != 0
        # Masked before the exponential: whatever stands at an unweighted token reaches neither value nor gradient.
        log_ratio_M = policy_logprobs_M.to(dtype) - old_logprobs_M.detach().to(dtype)
        return cls(
            log_ratio_M=torch.where(is_loss_M, log_ratio_M, 0.0),
            advantages_M=torch.where(is_loss_M, advantages_M.detach().to(dtype), 0.0),
            weights_M=loss_weights_M.detach().to(dtype),
            is_loss_M=is_loss_M,
        )

    def ratio_M(self) -> Tensor:
        """[M] with graph."""
        return _bounded_exp(self.log_ratio_M)

    def result(self, objective_M: Tensor, *, is_low_M: Tensor, is_high_M: Tensor) -> PolicyLoss:
        """-Σ weight · objective, with the sums for logging."""
        loss = -(self.weights_M * objective_M).sum()
        with torch.no_grad():
            bounded_M = self.log_ratio_M.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)
            zero = torch.zeros(1, dtype=bounded_M.dtype, device=bounded_M.device)
            return PolicyLoss(
                loss=loss,
                num_loss_tokens=self.is_loss_M.sum(),
                num_clipped_low=(self.is_loss_M & is_low_M).sum(),
                num_clipped_high=(self.is_loss_M & is_high_M).sum(),
                sum_ratio=torch.where(self.is_loss_M, bounded_M.exp(), 0.0).sum(),
                sum_kl_k3=(torch.expm1(bounded_M) - bounded_M).sum(),
                max_abs_log_ratio=torch.cat([self.log_ratio_M.abs(), zero]).amax(),
            )


def _clipped(
    tokens: _Tokens, ratio_M: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    advantages_M = tokens.advantages_M
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    is_high_M = (ratio_M > 1.0 + clip_high) & (advantages_M > 0)
    if dual_clip is not None:
        objective_M = torch.where(advantages_M < 0, objective_M.maximum(dual_clip * advantages_M), objective_M)
        is_high_M = is_high_M | ((ratio_M > dual_clip) & (advantages_M < 0))
    return tokens.result(objective_M, is_low_M=(ratio_M < 1.0 - clip_low) & (advantages_M < 0), is_high_M=is_high_M)


def _bounded_exp(log_ratio_M: Tensor) -> Tensor:
    return log_ratio_M.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()


def _weighted_sum(values_M: Tensor, loss_weights_M: Tensor) -> Tensor:
    assert values_M.shape == loss_weights_M.shape, (
        f"{tuple(loss_weights_M.shape)} weights for values of shape {tuple(values_M.shape)}"
    )
    dtype = torch.promote_types(values_M.dtype, torch.float32)
    kept_M = torch.where(loss_weights_M != 0, values_M.to(dtype), 0.0)
    return (loss_weights_M.detach().to(dtype) * kept_M).sum()
