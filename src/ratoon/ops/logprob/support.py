"""`support_logprob`: log-probs over the tokens that truncated sampling kept."""

# Shape letters: M scored tokens, C channels, V vocabulary, J kept pairs (a scored token with one of its kept tokens).

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratoon.ops.logprob.checks import check_tensors, checked_transform
from ratoon.ops.logprob.entry import LinearLogprob
from ratoon.ops.logprob.kept_pairs import KeptPairs
from ratoon.ops.logprob.kept_sets import KeptSets, KeptTiles
from ratoon.ops.logprob.projection import accumulate_dtype_of
from ratoon.ops.logprob.transform import LogitTransform
from ratoon.types import SampledSupport

CPU_WIDE_SHARE = 1 / 100
CUDA_WIDE_SHARE = 1 / 1500
"""Kept logits among all of them, above which dense tiles are faster. On an AMD EPYC core (C = 576, V = 49,152, fp32) a
pair costs 4 us in forward and backward, a logit of a tile 0.05 us; on an H200 (C = 4096, V = 151,936, bf16) 0.16 us and
0.1 ns."""

_LEAST_LOG_PROBABILITY = -700.0
"""Nats below the row's largest: what is less likely counts as this, which is nothing, and a masked token's -inf makes
no 0 * -inf."""


def support_logprob(
    hidden_MC: Tensor,
    weight_VC: Tensor,
    target_M: Tensor,
    support: SampledSupport,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_logprob` where each row's distribution is over the kept tokens of `support` alone.

    logprobs = z[target] - logsumexp(z[kept]) and entropy that of softmax(z[kept]), for the logits z that
    `linear_logprob` documents. The kept sets are constants: weights move and sets stay, so that a ratio of two such
    probabilities compares distributions over the same tokens (DeepSeek-V3.2, arXiv:2512.02556, "Keep Sampling Mask").

    Inputs, results, dtypes and errors are `linear_logprob`'s; bias is [V]. Besides:
    support: of M tokens, on the host. A target that is not in its set is a ValueError on the CPU and NaN on CUDA.

    Where few tokens are kept, only their logits are computed, one product for each of the J pairs: time is proportional
    to J, and memory is, besides the gradients, at most 64 bytes a pair and three [j, C] pieces of
    `kept_pairs.CPU_PIECE_BYTES` (`CUDA_PIECE_BYTES`). Where more than `CPU_WIDE_SHARE` (`CUDA_WIDE_SHARE`) of all
    M * V logits are kept, dense tiles of logits cost less than their share of single products: then it is
    `linear_logprob` with the others masked, in its tiles, with 32 bytes a pair and 32 a logit of a tile. Neither way
    holds [M, V] or [J, C], gradients are bitwise reproducible in both, and backward computes the logits again.
    """
    check_tensors("support_logprob", hidden_MC, weight_VC, target_M, bias)
    transform = checked_transform("support_logprob", temperature, logit_scale, logit_softcap)
    _check_support(hidden_MC, weight_VC, target_M, support)
    sets = KeptSets.build(support, hidden_MC.device)
    share = CUDA_WIDE_SHARE if hidden_MC.device.type == "cuda" else CPU_WIDE_SHARE
    if sets.rows.num_pairs > share * target_M.numel() * weight_VC.shape[0]:
        tiles = KeptTiles.build(sets, support, weight_VC.shape[0])
        logprobs_M, entropy_M = LinearLogprob.apply(hidden_MC, weight_VC, bias, target_M, transform, tiles)
        if target_M.device.type == "cpu":
            return logprobs_M, entropy_M  # its targets have been checked
        return torch.where(_has_target(sets, target_M), logprobs_M, torch.nan), entropy_M
    return _SupportLogprob.apply(hidden_MC, weight_VC, bias, target_M, sets, transform)


def _check_support(hidden_MC: Tensor, weight_VC: Tensor, target_M: Tensor, support: SampledSupport) -> None:
    M, V = hidden_MC.shape[0], weight_VC.shape[0]
    if support.num_tokens != M:
        raise ValueError(f"support_logprob: support must be of M={M} tokens, one set a row, got {support.num_tokens}")
    largest = int(support.token_ids.max(initial=0))
    if largest >= V:
        raise ValueError(f"support_logprob: support holds token id {largest}, but the weight has V={V} rows")
    if target_M.device.type == "cpu":
        missing = support.missing(target_M.numpy())
        if missing.size:
            raise ValueError(
                f"support_logprob: the target of row {missing[0]}, {int(target_M[missing[0]])}, is not among its kept "
                "tokens, so it cannot have been drawn from them; were targets and support taken from one response?"
            )


@dataclass(frozen=True, slots=True)
class _Softmax:
    """What backward needs to know of each row's softmax; all [M] fp64, nats."""

    max_M: Tensor
    log_sum_M: Tensor
    """Log of the sum of exp(logit - max)."""

    entropy_M: Tensor


class _SupportLogprob(torch.autograd.Function):
    """Keeps its inputs and three numbers a row between forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        sets: KeptSets,
        transform: LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        logprobs_M, softmax = _score(KeptPairs(hidden_MC, weight_VC, bias_V, sets, transform), target_M)
        saved_M = (softmax.max_M, softmax.log_sum_M, softmax.entropy_M)
        ctx.save_for_backward(hidden_MC, weight_VC, bias_V, target_M, *saved_M)
        ctx.sets, ctx.transform = sets, transform
        # An output that the loss does not use has the gradient None, and its terms are skipped.
        ctx.set_materialize_grads(False)
        dtype = accumulate_dtype_of(hidden_MC.dtype)
        # The saved entropy must not be the one that the caller may change in place.
        return logprobs_M.to(dtype), softmax.entropy_M.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "support_logprob can be differentiated once, got a backward pass with create_graph=True; "
                "compute log_softmax of full logits where a second derivative is needed"
            )
        if all(grad is None for grad in grad_outputs):
            return (None,) * 6
        hidden_MC, weight_VC, bias_V, target_M, *saved_M = ctx.saved_tensors
        pairs = KeptPairs(hidden_MC, weight_VC, bias_V, ctx.sets, ctx.transform)
        grad_J = _logit_grads(pairs, target_M, _Softmax(*saved_M), *grad_outputs)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_MC = pairs.hidden_grad(grad_J) if needs_hidden else None
        grad_weight_VC = grad_bias_V = None
        if needs_weight or needs_bias:
            grad_weight_VC, grad_bias_V = pairs.vocabulary_grads(grad_J, weight=needs_weight, bias=needs_bias)
        return grad_hidden_MC, grad_weight_VC, grad_bias_V, None, None, None


def _score(pairs: KeptPairs, target_M: Tensor) -> tuple[Tensor, _Softmax]:
    """Log-probs [M] fp64, and the softmax. NaN where a target is not among its kept tokens."""
    rows = pairs.sets.rows
    logit_J = pairs.project().mul_(pairs.transform.gain_out)
    # One pair of a row is its target, or none.
    logit_at_target_M = rows.sums(torch.where(pairs.sets.are_targets(target_M), logit_J, 0.0))
    max_M = rows.maxima(logit_J)
    below_J = logit_J.sub_(max_M.index_select(0, pairs.sets.row_J)).clamp_(min=_LEAST_LOG_PROBABILITY)
    exp_J = below_J.exp()
    sum_M = rows.sums(exp_J)
    log_sum_M = sum_M.log()
    entropy_M = log_sum_M - rows.sums(exp_J.mul_(below_J)) / sum_M
    # Rounding may not turn a probability into more than 1.
    logprobs_M = (logit_at_target_M - max_M - log_sum_M).clamp_(max=0)
    logprobs_M = torch.where(_has_target(pairs.sets, target_M), logprobs_M, torch.nan)
    return logprobs_M, _Softmax(max_M, log_sum_M, entropy_M.clamp_(min=0))


def _logit_grads(
    pairs: KeptPairs,
    target_M: Tensor,
    softmax: _Softmax,
    grad_logprobs_M: Tensor | None,
    grad_entropy_M: Tensor | None,
) -> Tensor:
    """[J] in the accumulation dtype: gradient of (hidden @ weight.T + bias) at the pairs.

    With p = softmax over the kept tokens and target t, in nats:
    d loss / d logit_j = grad_logprob * (1[j = t] - p_j) - grad_entropy * p_j * (log p_j + entropy).
    """
    y_J = pairs.project()
    log_p_J = y_J * pairs.transform.gain_out
    log_p_J -= softmax.max_M.index_select(0, pairs.sets.row_J)
    log_p_J.clamp_(min=_LEAST_LOG_PROBABILITY).sub_(softmax.log_sum_M.index_select(0, pairs.sets.row_J))
    grad_J = torch.zeros_like(log_p_J)
    if grad_entropy_M is not None:
        grad_J.copy_(log_p_J).add_(softmax.entropy_M.index_select(0, pairs.sets.row_J))
        grad_J.mul_(-grad_entropy_M.double().index_select(0, pairs.sets.row_J))
    p_J = log_p_J.exp_()
    if grad_logprobs_M is None:
        grad_J.mul_(p_J)
    else:
        at_target_J = grad_logprobs_M.double().index_select(0, pairs.sets.row_J)
        grad_J.sub_(at_target_J).mul_(p_J)
        grad_J.add_(at_target_J.mul_(pairs.sets.are_targets(target_M)))
    grad_J.mul_(pairs.transform.slope)
    if pairs.transform.softcap is not None:
        grad_J.addcmul_(grad_J, y_J.square_(), value=-1.0)
    return grad_J.to(accumulate_dtype_of(pairs.hidden_MC.dtype))


def _has_target(sets: KeptSets, target_M: Tensor) -> Tensor:
    """[M] bool."""
    return sets.rows.sums(sets.are_targets(target_M).double()) == 1
