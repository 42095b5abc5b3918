"""Scalars to minimise, as weighted sums over the scored tokens of one microbatch.

Weights come from `aggregation` and carry every denominator; a weight of 0 marks a token that is not
trained on, and its other entries are never looked at (they may be NaN). Sums run in float32, or in
the log-probs' dtype where that is wider.
"""

# Shape letters: M scored tokens of one microbatch.

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Tokens without gradient because the ratio fell below 1 - clip_low (advantage < 0)."""

    num_clipped_high: Tensor
    """Tokens without gradient because the ratio rose above 1 + clip_high (advantage > 0)."""

    sum_ratio: Tensor
    """Probability ratios, policy over old, before clipping. Their mean stays near 1."""

    sum_kl_k3: Tensor
    """Nats. ratio - 1 - log ratio, never negative: an unbiased estimate of KL(old || policy)."""

    max_abs_log_ratio: Tensor
    """Nats, before any bound. Combine by maximum, not by sum."""


def clipped_policy_loss(
    policy_logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    loss_weights_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-Σ weight · min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A).

    PPO clip: arXiv 1707.06347, §3, eq. 7. A `clip_high` above `clip_low` is DAPO's clip-higher:
    arXiv 2503.14476, §3.1. Per-token k3: Schulman, "Approximating KL divergence" (2020).

    policy_logprobs_M: [M] under the current weights, with graph. old_logprobs_M: [M] under the
    weights at the step's start. advantages_M: [M], each response's advantage at its tokens.
    loss_weights_M: [M] from `aggregation`.

    Log ratios are held within ±20 nats, so that no ratio overflows and no 0 · inf appears. Beyond
    that bound a token has no gradient; within the clip range, where learning happens, nothing changes.
    M = 0 gives a loss of 0 whose backward works.
    """
    for name, other in (("old_logprobs", old_logprobs_M), ("advantages", advantages_M), ("weights", loss_weights_M)):
        assert other.shape == policy_logprobs_M.shape, (
            f"{name} of shape {tuple(other.shape)} for policy_logprobs of {tuple(policy_logprobs_M.shape)}"
        )
    dtype = torch.promote_types(policy_logprobs_M.dtype, torch.float32)
    is_loss_M = loss_weights_M != 0
    # Masked before the exponential: whatever stands at an unweighted token reaches neither value nor gradient.
    log_ratio_M = torch.where(is_loss_M, policy_logprobs_M.to(dtype) - old_logprobs_M.detach().to(dtype), 0.0)
    advantages_M = torch.where(is_loss_M, advantages_M.detach().to(dtype), 0.0)

    bounded_M = log_ratio_M.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)
    ratio_M = bounded_M.exp()
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_M = torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    loss = -(loss_weights_M.detach().to(dtype) * objective_M).sum()

    with torch.no_grad():
        zero = torch.zeros(1, dtype=dtype, device=log_ratio_M.device)
        return PolicyLoss(
            loss=loss,
            num_loss_tokens=is_loss_M.sum(),
            num_clipped_low=((ratio_M < 1.0 - clip_low) & (advantages_M < 0)).sum(),
            num_clipped_high=((ratio_M > 1.0 + clip_high) & (advantages_M > 0)).sum(),
            sum_ratio=torch.where(is_loss_M, ratio_M, 0.0).sum(),
            sum_kl_k3=(torch.expm1(bounded_M) - bounded_M).sum(),
            max_abs_log_ratio=torch.cat([log_ratio_M.abs(), zero]).amax(),
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


def _weighted_sum(values_M: Tensor, loss_weights_M: Tensor) -> Tensor:
    assert values_M.shape == loss_weights_M.shape, (
        f"{tuple(loss_weights_M.shape)} weights for values of shape {tuple(values_M.shape)}"
    )
    dtype = torch.promote_types(values_M.dtype, torch.float32)
    kept_M = torch.where(loss_weights_M != 0, values_M.to(dtype), 0.0)
    return (loss_weights_M.detach().to(dtype) * kept_M).sum()
