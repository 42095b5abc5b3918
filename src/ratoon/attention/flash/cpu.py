"""PyTorch's CPU flash kernel: it returns the log-sum-exp, runs fp64, and reads shared key heads in place.

A zero-length query or key kills the process; schedules have none.
"""

# Shape letters: T rows, B runs of a batch, L rows of a run, H heads (Hq query, Hkv key and value), D head dim.

import torch
from torch import Tensor

from ratoon.attention.flash.merged import MergedRows
from ratoon.attention.flash.schedule import CpuSchedule, Runs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, schedule: CpuSchedule, softmax_scale: float) -> MergedRows:
    """Output and log-sum-exp in fp32, or fp64 for fp64."""
    dtype = _sum_dtype(q_THD)
    out_THD = torch.empty(q_THD.shape, dtype=dtype)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=dtype)
    for runs in schedule.own:
        out_BLHD, lse_BLH = _call(q_THD, k_THD, v_THD, runs, runs, softmax_scale, is_causal=True)
        runs.store(out_THD, out_BLHD)
        runs.store(lse_TH, lse_BLH)
    for batch in schedule.ancestors:
        part_BLHD, part_lse_BLH = _call(q_THD, k_THD, v_THD, batch.queries, batch.keys, softmax_scale, is_causal=False)
        out_BLHD, lse_BLH = batch.queries.take(out_THD), batch.queries.take(lse_TH)
        weight_BLH = torch.sigmoid(part_lse_BLH - lse_BLH)
        batch.queries.put_back(out_THD, out_BLHD.lerp_(part_BLHD.to(dtype), weight_BLH[..., None]))
        batch.queries.store(lse_TH, torch.logaddexp(lse_BLH, part_lse_BLH))
    return MergedRows(out_THD, lse_TH)


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    merged: MergedRows,
    schedule: CpuSchedule,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, in fp32, or fp64 for fp64.

    With the merged output and log-sum-exp, each part's kernel sees the probabilities of the whole row.
    """
    dtype = _sum_dtype(q_THD)
    dq_THD, dk_THD, dv_THD = (torch.empty(x.shape, dtype=dtype) for x in (q_THD, k_THD, v_THD))

    def part_gradients(queries: Runs, keys: Runs, is_causal: bool) -> list[Tensor]:
        grads = _backward(
            *(queries.take(dout_THD).transpose(1, 2), queries.take(q_THD).transpose(1, 2)),
            *(keys.take(k_THD).transpose(1, 2), keys.take(v_THD).transpose(1, 2)),
            *(queries.take(merged.out_THD).transpose(1, 2), queries.take(merged.lse_TH).transpose(1, 2)),
            0.0,
            is_causal,
            scale=softmax_scale,
        )
        return [grad_BHLD.transpose(1, 2).to(dtype) for grad_BHLD in grads]

    for runs in schedule.own:
        for total_THD, grad_BLHD in zip((dq_THD, dk_THD, dv_THD), part_gradients(runs, runs, True), strict=True):
            runs.store(total_THD, grad_BLHD)
    for batch in schedule.ancestors:
        of_queries, of_keys = batch.queries, batch.keys
        part_grads = part_gradients(of_queries, of_keys, False)
        for runs, total_THD, grad_BLHD in zip(
            (of_queries, of_keys, of_keys), (dq_THD, dk_THD, dv_THD), part_grads, strict=True
        ):
            runs.put_back(total_THD, runs.take(total_THD).add_(grad_BLHD))
    return dq_THD, dk_THD, dv_THD


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _call(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    queries: Runs,
    keys: Runs,
    softmax_scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """-> [B, L, Hq, D], [B, L, Hq]."""
    out_BHLD, lse_BHL = _forward(
        queries.take(q_THD).transpose(1, 2),
        keys.take(k_THD).transpose(1, 2),
        keys.take(v_THD).transpose(1, 2),
        0.0,
        is_causal,
        scale=softmax_scale,
    )
    return out_BHLD.transpose(1, 2), lse_BHL.transpose(1, 2)
