"""How far the policy has moved from a frozen reference model, estimated from the sampled tokens.

With d = policy log-prob - reference log-prob of a token that the policy drew, three estimates of
KL(policy || reference): k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. Schulman, "Approximating KL divergence" (2020):
k1 and k3 are unbiased, k3 is never negative and varies less, k2 is biased.

As a *number* (logged, or subtracted from a reward) each may be used. As a *loss* only its gradient counts, and
there the order changes: the gradient of k1 is that of the log-prob, 0 on average, and pulls nowhere; that of k2,
d · grad log-prob, is an unbiased estimate of the gradient of KL(policy || reference); that of k3,
(1 - exp(-d)) · grad log-prob, is the one of KL(reference || policy), and agrees with k2's where d is small.
"""

# Shape letters: M scored tokens of one microbatch.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.algorithms.config import KlEstimator

_MAX_EXPONENT = 20.0
"""Nats. k3 of a token that the reference finds exp(20) times likelier is as large as it gets, and no longer pulls."""

_MAX_ABS_LOG_RATIO = 1e4
"""Nats, for values: a reference that excludes a token gives a large number instead of infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class KlLoss:
    """The KL term of one microbatch. 0-D tensors."""

    loss: Tensor
    """Nats, weighted sum; adds up over microbatches and ranks to the step's mean. Differentiable."""

    sum_kl: Tensor
    """Nats, over loss tokens, each counted once; without graph."""


def kl_estimates(policy_logprobs_M: Tensor, ref_logprobs_M: Tensor, *, estimator: KlEstimator) -> Tensor:
    """[M] nats: the estimate at each token, differentiable in the policy.

    policy_logprobs_M: [M] under the current weights. ref_logprobs_M: [M] under the reference; no gradient.
    Finite for log-probs that are finite, and for -inf on one side; NaN stays NaN.
    """
    assert policy_logprobs_M.shape == ref_logprobs_M.shape, (
        f"{tuple(ref_logprobs_M.shape)} reference log-probs for {tuple(policy_logprobs_M.shape)} of the policy"
    )
    dtype = torch.promote_types(policy_logprobs_M.dtype, torch.float32)
    log_ratio_M = policy_logprobs_M.to(dtype) - ref_logprobs_M.detach().to(dtype)
    log_ratio_M = log_ratio_M.clamp(-_MAX_ABS_LOG_RATIO, _MAX_ABS_LOG_RATIO)
    if estimator == "k1":
        return log_ratio_M
    if estimator == "k2":
        return 0.5 * log_ratio_M.square()
    # Bounded on one side only: far on the other the estimate is linear, and there it has to pull.
    bounded_M = log_ratio_M.clamp(min=-_MAX_EXPONENT)
    return torch.expm1(-bounded_M) + bounded_M


def kl_loss(
    policy_logprobs_M: Tensor, ref_logprobs_M: Tensor, loss_weights_M: Tensor, *, estimator: KlEstimator
) -> KlLoss:
    """Σ weight · estimate: add `kl_coefficient` times it to the loss.

    GRPO, arXiv 2402.03300, §4.1.1, eq. 4 (k3 in the loss). loss_weights_M: [M] from `aggregation`; what stands at
    a token of weight 0 is never looked at. M = 0 gives 0, whose backward works.

    The tokens are the old policy's: after the first of several updates in a step the estimate leans by as much as the
    policy has moved since.
    """
    is_loss_M = loss_weights_M != 0
    # A token whose entries do not count has a log-prob of 0 on both sides.
    kl_M = kl_estimates(
        torch.where(is_loss_M, policy_logprobs_M, 0.0), torch.where(is_loss_M, ref_logprobs_M, 0.0), estimator=estimator
    )
    loss = (loss_weights_M.detach().to(kl_M.dtype) * kl_M).sum()
    return KlLoss(loss=loss, sum_kl=kl_M.detach().sum())
