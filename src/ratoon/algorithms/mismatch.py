"""The rollout engine's probabilities and the trainer's differ, at the very same weights; measured, and corrected.

mismatch = old_logprobs - rollout_logprobs. Samples come from the engine's distribution, so the exact gradient weighs
each by exp(mismatch) of the whole response; every correction here trades exactness for variance. What is measured is
measured before any bound, so that a growing gap shows however hard the correction cuts.
"""

# Shape letters: M scored tokens of one microbatch, N sequences.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.algorithms.config import AlgorithmConfig
from ratoon.algorithms.sequences import sequence_means, sequence_sums

_MAX_ABS_LOG_RATIO = 20.0
"""Nats; of a token or a response, before exponentiation, so that no ratio overflows."""


@dataclass(frozen=True, slots=True, eq=False)
class MismatchSums:
    """The gap over one microbatch's loss tokens, before any correction. 0-D tensors without graph."""

    num_tokens: Tensor
    sum_abs: Tensor
    """Nats, |mismatch|."""

    max_abs: Tensor
    """Nats, not bounded. Combine by maximum."""

    sum_ratio: Tensor
    """exp(mismatch) of single tokens: the trainer's probability over the engine's."""

    max_ratio: Tensor
    """Combine by maximum. Never above exp(20)."""

    sum_kl_k3: Tensor
    """Nats. ratio - 1 - log ratio: an unbiased estimate of KL(rollout || trainer), never negative."""


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What each token's policy loss is multiplied by. Without graph."""

    factor_M: Tensor
    """[M] >= 0; 1 at tokens that are not trained on."""

    sum_factor: Tensor
    """0-D, over loss tokens."""

    num_corrected: Tensor
    """0-D: loss tokens whose ratio was cut or masked."""


@torch.no_grad()
def mismatch_sums(old_logprobs_M: Tensor, rollout_logprobs_M: Tensor, loss_weights_M: Tensor) -> MismatchSums:
    """The gap between trainer and engine, for logging.

    old_logprobs_M: [M] by the trainer, under the weights that the engine drew with. rollout_logprobs_M: [M].
    """
    mismatch_M, is_loss_M = _mismatch(old_logprobs_M, rollout_logprobs_M, loss_weights_M)
    bounded_M = mismatch_M.clamp(-_MAX_ABS_LOG_RATIO, _MAX_ABS_LOG_RATIO)
    ratio_M = torch.where(is_loss_M, bounded_M.exp(), 0.0)
    zero = torch.zeros(1, dtype=mismatch_M.dtype, device=mismatch_M.device)
    return MismatchSums(
        num_tokens=is_loss_M.sum(),
        sum_abs=mismatch_M.abs().sum(),
        max_abs=torch.cat([mismatch_M.abs(), zero]).amax(),
        sum_ratio=ratio_M.sum(),
        max_ratio=torch.cat([ratio_M, zero]).amax(),
        sum_kl_k3=(torch.expm1(bounded_M) - bounded_M).sum(),
    )


@torch.no_grad()
def mismatch_correction(
    config: AlgorithmConfig,
    old_logprobs_M: Tensor,
    rollout_logprobs_M: Tensor,
    loss_weights_M: Tensor,
    sequence_of_M: Tensor,
    *,
    num_sequences: int,
) -> Correction:
    """The factors of `config.mismatch_correction`, which is not "none".

    token-tis: min(ratio, max). Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025), truncated importance sampling. Biased, of low variance.
    masked-is: the ratio up to max, 0 above. icepop: the ratio within [min, max], 0 outside. IcePop, Ling team, "Small
    Leak Can Sink a Great Ship" (2025), and arXiv 2512.16144, eq. 1.
    sequence-tis, sequence-masked-is: the same with one ratio for all tokens of a response. Liu et al., "When Speed
    Kills Stability" (2025), §4. With mismatch_sequence_ratio "product" it is the exact importance ratio
    exp(Σ mismatch), whose mean over samples is 1 at any length; but as Σ mismatch is -length · KL on average, the
    typical ratio of a long response is near 0 and the rare large ones are cut, so long responses lose weight.
    "geometric-mean", exp(mean mismatch), does not see the length; it measures the gap rather than correcting it.

    Masked tokens stay in the loss's denominators: what a token contributes does not depend on its siblings' ratios.
    The log ratio is bounded from above before the exponential, so that every factor is finite at any length. With one
    update a step, old_logprobs_M is the policy itself, detached. sequence_of_M: [M] integers below `num_sequences`.
    """
    kind, largest = config.mismatch_correction, config.mismatch_max_ratio
    assert kind != "none" and largest is not None, "there is no correction to make"
    log_ratio_M, is_loss_M = _mismatch(old_logprobs_M, rollout_logprobs_M, loss_weights_M)
    if kind in ("sequence-tis", "sequence-masked-is"):
        if config.mismatch_sequence_ratio == "product":
            sum_N = sequence_sums(log_ratio_M, is_loss_M, sequence_of_M, num_sequences=num_sequences)
            log_ratio_M = sum_N[sequence_of_M.long()]
        else:
            log_ratio_M = sequence_means(log_ratio_M, is_loss_M, sequence_of_M, num_sequences=num_sequences)
    ratio_M = log_ratio_M.clamp(max=_MAX_ABS_LOG_RATIO).exp()  # a very negative one is 0, which is right
    is_corrected_M = ratio_M > largest
    if kind in ("token-tis", "sequence-tis"):
        factor_M = ratio_M.clamp(max=largest)
    else:
        if kind == "icepop":
            assert config.mismatch_min_ratio is not None, "icepop has two bounds"
            is_corrected_M = is_corrected_M | (ratio_M < config.mismatch_min_ratio)
        factor_M = torch.where(is_corrected_M, 0.0, ratio_M)
    return Correction(
        factor_M=torch.where(is_loss_M, factor_M, 1.0),
        sum_factor=torch.where(is_loss_M, factor_M, 0.0).sum(),
        num_corrected=(is_corrected_M & is_loss_M).sum(),
    )


def _mismatch(old_logprobs_M: Tensor, rollout_logprobs_M: Tensor, loss_weights_M: Tensor) -> tuple[Tensor, Tensor]:
    """[M] old - rollout, 0 at tokens that are not trained on; [M] bool, which are."""
    assert old_logprobs_M.shape == rollout_logprobs_M.shape == loss_weights_M.shape, (
        f"{tuple(old_logprobs_M.shape)} old and {tuple(rollout_logprobs_M.shape)} rollout log-probs for "
        f"{tuple(loss_weights_M.shape)} weights"
    )
    dtype = torch.promote_types(old_logprobs_M.dtype, torch.float32)
    is_loss_M = loss_weights_M != 0
    return torch.where(is_loss_M, old_logprobs_M.to(dtype) - rollout_logprobs_M.to(dtype), 0.0), is_loss_M
