"""The autograd op over levels of flash kernels; sinks and head dims that the kernels lack are added here."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ratoon.attention.flash import cpu, fa2
from ratoon.attention.flash.merged import MergedRows
from ratoon.attention.flash.schedule import CpuSchedule, VarlenSchedule, build_cpu_schedule, build_varlen_schedule
from ratoon.attention.plan import AttentionPlan

FA2_HEAD_DIM_MULTIPLE = 8


def flash_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """[T, Hq, value head dim] in q's dtype.

    The kernels want one head dim for all three: zeros added to the shorter ones change no score and
    no value, and are cut off again.
    """
    schedule = plan.schedule(build_cpu_schedule if plan.device.type == "cpu" else build_varlen_schedule)
    v_head_dim = v_THD.shape[2]
    head_dim = max(q_THD.shape[2], v_head_dim)
    if isinstance(schedule, VarlenSchedule):
        head_dim = -(-head_dim // FA2_HEAD_DIM_MULTIPLE) * FA2_HEAD_DIM_MULTIPLE
    q_THD, k_THD, v_THD = (_pad_head_dim(x, head_dim) for x in (q_THD, k_THD, v_THD))
    out_THD = _FlashAttention.apply(q_THD, k_THD, v_THD, sinks_H, schedule, softmax_scale)
    return out_THD if v_head_dim == head_dim else out_THD[..., :v_head_dim]


def _pad_head_dim(tensor_THD: Tensor, head_dim: int) -> Tensor:
    missing = head_dim - tensor_THD.shape[2]
    return functional.pad(tensor_THD, (0, missing)) if missing else tensor_THD


def _kernel_ready(tensor_THD: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        schedule: CpuSchedule | VarlenSchedule,
        softmax_scale: float,
    ) -> Tensor:
        q_THD, k_THD, v_THD = (_kernel_ready(x) for x in (q_THD, k_THD, v_THD))
        if q_THD.shape[0] == 0:  # FA2 refuses a batch of no sequences
            merged = MergedRows(torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2]))
        elif isinstance(schedule, VarlenSchedule):
            merged = fa2.forward(q_THD, k_THD, v_THD, schedule, softmax_scale)
        else:
            merged = cpu.forward(q_THD, k_THD, v_THD, schedule, softmax_scale)
        out_THD, lse_TH, dropout_state = merged
        if sinks_H is not None:
            # A sink is one more key of every row, whose value is zero.
            with_sink_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
            out_THD = out_THD * torch.exp(lse_TH - with_sink_TH)[..., None]
            lse_TH = with_sink_TH
        out_THD = out_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_THD, v_THD, sinks_H, out_THD, lse_TH, *dropout_state)
        ctx.schedule, ctx.softmax_scale = schedule, softmax_scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout_THD: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THD, sinks_H, out_THD, lse_TH, *dropout_state = ctx.saved_tensors
        dout_THD = _kernel_ready(dout_THD)
        merged = MergedRows(out_THD, lse_TH, tuple(dropout_state))
        if q_THD.shape[0] == 0:
            dq_THD, dk_THD, dv_THD = (torch.zeros_like(x) for x in (q_THD, k_THD, v_THD))
        elif isinstance(ctx.schedule, VarlenSchedule):
            dq_THD, dk_THD, dv_THD = fa2.backward(
                dout_THD, q_THD, k_THD, v_THD, merged, ctx.schedule, ctx.softmax_scale
            )
        else:
            dq_THD, dk_THD, dv_THD = cpu.backward(
                dout_THD, q_THD, k_THD, v_THD, merged, ctx.schedule, ctx.softmax_scale
            )
        dsinks_H = None
        if sinks_H is not None:
            sink_probs_TH = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH)
            # The sink's own value is zero, so only the mean that every score's gradient loses is left.
            mean_TH = (out_THD.to(lse_TH.dtype) * dout_THD.to(lse_TH.dtype)).sum(dim=-1)
            dsinks_H = -(sink_probs_TH * mean_TH).sum(dim=0).to(sinks_H.dtype)
        return dq_THD.to(q_THD.dtype), dk_THD.to(k_THD.dtype), dv_THD.to(v_THD.dtype), dsinks_H, None, None
