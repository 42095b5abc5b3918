"""The autograd op that every pair of kernels shares; the sinks' gradient is computed here, for all of them."""

# Shape letters: T rows, B rows of a chunk, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.attention.kernel import BackwardKernel, ForwardKernel, Scoring
from ratoon.attention.plan import AttentionPlan

MAX_CHUNK_ELEMENTS = 1 << 24
"""Elements of the output that the sinks' gradient widens at a time: 64 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class KernelPair:
    """One call's kernels. They may be of different implementations: only tensors pass between them."""

    forward: ForwardKernel
    backward: BackwardKernel


def attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    scoring: Scoring,
    kernels: KernelPair,
    *,
    deterministic: bool,
) -> Tensor:
    """[T, Hq, E] in q's dtype, once differentiable in q, k, v and sinks. Any strides; T may be 0.

    Keeps q, k, v, the output and one number for each row and head until backward has run.
    """
    return _Attention.apply(q_THD, k_THD, v_THE, sinks_H, plan, scoring, kernels, deterministic)


def without_autocast(device: torch.device) -> torch.autocast:
    """The dtype of the computation is the kernels' to choose, in the backward pass too."""
    return torch.autocast(device.type, enabled=False)


def run_forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    scoring: Scoring,
    kernels: KernelPair,
) -> tuple[Tensor, Tensor]:
    """The output [T, Hq, E] and log-sum-exp [Hq, T] of one call, without a graph. Any strides; T may be 0."""
    q_THD, k_THD, v_THE = (_kernel_ready(x) for x in (q_THD, k_THD, v_THE))
    sinks_H = None if sinks_H is None else sinks_H.contiguous()  # kernels take its numbers one after another
    out_shape = (*q_THD.shape[:2], v_THE.shape[2])
    if plan.num_rows == 0:  # stock kernels refuse a batch of no sequences
        return q_THD.new_empty(out_shape), q_THD.new_empty(q_THD.shape[1], 0, dtype=sum_dtype(q_THD.dtype))
    with without_autocast(plan.device):
        out_THE, lse_HT = kernels.forward(q_THD, k_THD, v_THE, sinks_H, plan, scoring)
    assert out_THE.shape == out_shape and out_THE.dtype == q_THD.dtype, (
        f"the forward kernel returned {tuple(out_THE.shape)} of {out_THE.dtype}"
    )
    assert lse_HT.shape == (out_shape[1], out_shape[0]) and lse_HT.dtype == sum_dtype(q_THD.dtype), (
        f"the forward kernel returned a log-sum-exp {tuple(lse_HT.shape)} of {lse_HT.dtype}"
    )
    return out_THE, lse_HT


def run_backward(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    kernels: KernelPair,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of what `run_forward` was given and returned."""
    dout_THE, q_THD, k_THD, v_THE = (_kernel_ready(x) for x in (dout_THE, q_THD, k_THD, v_THE))
    if plan.num_rows == 0:
        return torch.zeros_like(q_THD), torch.zeros_like(k_THD), torch.zeros_like(v_THE)
    with without_autocast(plan.device):
        gradients = kernels.backward(
            dout_THE, q_THD, k_THD, v_THE, out_THE, lse_HT, plan, scoring, deterministic=deterministic
        )
    for gradient, x in zip(gradients, (q_THD, k_THD, v_THE), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype, (
            f"the backward kernel returned {tuple(gradient.shape)} of {gradient.dtype} for {tuple(x.shape)}"
        )
    return gradients


def gradient_of_sinks(dout_THE: Tensor, out_THE: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """[Hq] in the sinks' dtype, summed in the log-sum-exp's.

    A sink's own value is zero, so only the mean that every score's gradient loses is left.
    """
    sinks_H1 = sinks_H.to(lse_HT.dtype)[:, None]
    dsinks_H = torch.zeros_like(sinks_H1[:, 0])
    num_rows, num_heads, v_head_dim = out_THE.shape
    chunk = max(1, MAX_CHUNK_ELEMENTS // (num_heads * v_head_dim))
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        # The product is exact in the wider dtype, and never held for all rows.
        mean_HB = (out_THE[rows].to(lse_HT.dtype) * dout_THE[rows]).sum(dim=-1).T
        dsinks_H -= (torch.exp(sinks_H1 - lse_HT[:, rows]) * mean_HB).sum(dim=1)
    return dsinks_H.to(sinks_H.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores of that dtype are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THE: Tensor,
        sinks_H: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
        kernels: KernelPair,
        deterministic: bool,
    ) -> Tensor:
        out_THE, lse_HT = run_forward(q_THD, k_THD, v_THE, sinks_H, plan, scoring, kernels)
        ctx.save_for_backward(q_THD, k_THD, v_THE, sinks_H, out_THE, lse_HT)
        ctx.plan, ctx.scoring, ctx.kernels, ctx.deterministic = plan, scoring, kernels, deterministic
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout_THE: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THE, sinks_H, out_THE, lse_HT = ctx.saved_tensors
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if any(ctx.needs_input_grad[:3]):
            gradients = run_backward(
                dout_THE, q_THD, k_THD, v_THE, out_THE, lse_HT, ctx.plan, ctx.scoring, ctx.kernels,
                deterministic=ctx.deterministic,
            )  # fmt: skip
        dsinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[3]:
            with without_autocast(ctx.plan.device):
                dsinks_H = gradient_of_sinks(dout_THE, out_THE, lse_HT, sinks_H)
        return *gradients, dsinks_H, *_NO_GRADS


_NO_GRADS = (None, None, None, None)
"""Of plan, scoring, kernels and deterministic."""


def _kernel_ready(tensor: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
