"""`linear_logprob`: the public call and its place in autograd."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from typing import Any

import torch
from torch import Tensor

from ratoon.ops.logprob.checks import check_tensors, checked_transform
from ratoon.ops.logprob.gradients import RowGrads, Wanted, input_grads
from ratoon.ops.logprob.kept_sets import KeptTiles
from ratoon.ops.logprob.projection import Projection
from ratoon.ops.logprob.scoring import SoftmaxStats, score
from ratoon.ops.logprob.transform import LogitTransform


def linear_logprob(
    hidden_MC: Tensor,
    weight_VC: Tensor,
    target_M: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target, and entropy of its distribution, without ever holding [M, V].

    The logits are, in this order,

        z = hidden @ weight.T + bias
        z = logit_scale * z                                 Cohere's logit_scale; Granite: 1 / logits_scaling
        z = logit_softcap * tanh(z / logit_softcap)         Gemma 2's final_logit_softcapping; skipped when None
        z = z / temperature

    and logprobs = log_softmax(z)[target], entropy = -sum(softmax(z) * log_softmax(z)), both in nats.

    hidden_MC: [M, C], fp64, fp32, bf16 or fp16; M may be 0.
    weight_VC: [V, C], hidden's dtype and device: a language model's output embedding.
    target_M: [M], integers in [0, V), on hidden's device. Every row is scored: there is no ignored index.
    temperature: finite, at least `MIN_TEMPERATURE`. logit_scale: finite. logit_softcap: finite, above 0.
    bias: [V], hidden's dtype; -inf masks a token (where logit_scale is above 0 and no softcap makes it finite again).

    Returns logprobs [M] and entropy [M], fp32 (fp64 for fp64 input). Logits and all sums are fp32 (fp64) too, also for
    bf16 and fp16 input; only on CUDA do the logits' gradients enter products and sums in the input's dtype.
    Probabilities below 2^-64 (fp64: 2^-512) count as 0.

    Both results are differentiable once, with respect to hidden, weight and bias; gradients that nobody needs are not
    computed. Backward computes the logits again: forward keeps three numbers a row. Besides the gradients themselves,
    both take a few tiles of logits (`tiling`) and, for bf16 and fp16, one [M, C] and one piece of the weight in fp32.

    A target outside [0, V) raises ValueError on the CPU. On CUDA nothing waits for the device, so there the row's
    log-prob is NaN. Other wrong input raises ValueError everywhere.
    """
    check_tensors("linear_logprob", hidden_MC, weight_VC, target_M, bias)
    transform = checked_transform("linear_logprob", temperature, logit_scale, logit_softcap)
    return LinearLogprob.apply(hidden_MC, weight_VC, bias, target_M, transform, None)


class LinearLogprob(torch.autograd.Function):
    """Keeps its inputs and three numbers a row between forward and backward.

    kept: the tokens that each row's distribution is over; None: all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        transform: LogitTransform,
        kept: KeptTiles | None,
    ) -> tuple[Tensor, Tensor]:
        scores = score(Projection.build(hidden_MC, weight_VC, bias_V, target_M, transform, kept))
        softmax = scores.softmax
        # Neither result is kept, so both may be changed in place.
        saved_M = (softmax.max_M, softmax.exp_sum_M, softmax.mean_bits_M)
        ctx.save_for_backward(hidden_MC, weight_VC, bias_V, target_M, *saved_M)
        ctx.transform, ctx.kept = transform, kept
        # An output that the loss does not use has the gradient None, and its terms are skipped.
        ctx.set_materialize_grads(False)
        return scores.logprobs_M, scores.entropy_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_logprob can be differentiated once, got a backward pass with create_graph=True; "
                "compute log_softmax of full logits where a second derivative is needed"
            )
        grad_logprobs_M, grad_entropy_M = grad_outputs
        if grad_logprobs_M is None and grad_entropy_M is None:
            return (None,) * 6
        hidden_MC, weight_VC, bias_V, target_M, *saved_M = ctx.saved_tensors
        grads = input_grads(
            Projection.build(hidden_MC, weight_VC, bias_V, target_M, ctx.transform, ctx.kept),
            RowGrads.build(SoftmaxStats(*saved_M), grad_logprobs_M, grad_entropy_M),
            Wanted(*ctx.needs_input_grad[:3]),
        )
        dtype = hidden_MC.dtype
        grad_hidden_MC = None if grads.hidden_MC is None else grads.hidden_MC.to(dtype)
        grad_bias_V = None if grads.bias_V is None else grads.bias_V.to(dtype)
        return grad_hidden_MC, grads.weight_VC, grad_bias_V, None, None, None
