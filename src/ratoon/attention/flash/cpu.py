"""PyTorch's CPU flash kernel: it returns the log-sum-exp, runs fp64, and reads shared key heads in place.

A zero-length query or key kills the process; schedules have none.
"""

# Shape letters: T rows, B runs of a batch, L rows of a run, H heads (Hq query, Hkv key and value), D head dim,
# E value head dim.

import torch
from torch import Tensor

from ratoon.attention.flash.merge import add_sinks
from ratoon.attention.flash.padding import cut, pad_head_dim
from ratoon.attention.flash.schedule import Runs, build_cpu_schedule
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """See `ForwardKernel`. Any floating dtype, any head dims."""
    v_head_dim, dtype = v_THE.shape[2], _sum_dtype(q_THD)
    head_dim = max(q_THD.shape[2], v_head_dim)
    q_THD, k_THD, v_THD = (pad_head_dim(x, head_dim) for x in (q_THD, k_THD, v_THE))
    out_THD = torch.empty(q_THD.shape, dtype=dtype)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=dtype)
    schedule = plan.schedule(build_cpu_schedule)
    for runs in schedule.own:
        out_BLHD, lse_BLH = _call(q_THD, k_THD, v_THD, runs, runs, scoring, is_causal=True)
        runs.store(out_THD, out_BLHD)
        runs.store(lse_TH, lse_BLH)
    for batch in schedule.ancestors:
        part_BLHD, part_lse_BLH = _call(q_THD, k_THD, v_THD, batch.queries, batch.keys, scoring, is_causal=False)
        out_BLHD, lse_BLH = batch.queries.take(out_THD), batch.queries.take(lse_TH)
        weight_BLH = torch.sigmoid(part_lse_BLH - lse_BLH)
        batch.queries.put_back(out_THD, out_BLHD.lerp_(part_BLHD.to(dtype), weight_BLH[..., None]))
        batch.queries.store(lse_TH, torch.logaddexp(lse_BLH, part_lse_BLH))
    lse_HT = lse_TH.T.contiguous()
    if sinks_H is not None:
        out_THD, lse_HT = add_sinks(out_THD, lse_HT, sinks_H)
    return cut(out_THD, v_head_dim).to(q_THD.dtype), lse_HT


def backward(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `BackwardKernel`. Deterministic always. Sums in fp32, or fp64 for fp64.

    With the merged output and log-sum-exp, each part's kernel sees the probabilities of the whole row.
    """
    head_dims = q_THD.shape[2], k_THD.shape[2], v_THE.shape[2]
    q_THD, k_THD, v_THD, dout_THD, out_THD = (
        pad_head_dim(x, max(head_dims)) for x in (q_THD, k_THD, v_THE, dout_THE, out_THE)
    )
    lse_TH = lse_HT.T
    dtype = _sum_dtype(q_THD)
    dq_THD, dk_THD, dv_THD = (torch.empty(x.shape, dtype=dtype) for x in (q_THD, k_THD, v_THD))

    def part_gradients(queries: Runs, keys: Runs, is_causal: bool) -> list[Tensor]:
        grads = _backward(
            *(queries.take(dout_THD).transpose(1, 2), queries.take(q_THD).transpose(1, 2)),
            *(keys.take(k_THD).transpose(1, 2), keys.take(v_THD).transpose(1, 2)),
            *(queries.take(out_THD).transpose(1, 2), queries.take(lse_TH).transpose(1, 2)),
            0.0,
            is_causal,
            scale=scoring.softmax_scale,
        )
        return [grad_BHLD.transpose(1, 2).to(dtype) for grad_BHLD in grads]

    schedule = plan.schedule(build_cpu_schedule)
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
    dq_THD, dk_THD, dv_THE = (
        cut(x, head_dim).to(q_THD.dtype) for x, head_dim in zip((dq_THD, dk_THD, dv_THD), head_dims, strict=True)
    )
    return dq_THD, dk_THD, dv_THE


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _call(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    queries: Runs,
    keys: Runs,
    scoring: Scoring,
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
        scale=scoring.softmax_scale,
    )
    return out_BHLD.transpose(1, 2), lse_BHL.transpose(1, 2)
