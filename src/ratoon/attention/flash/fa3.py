"""FlashAttention-3 (package flash_attn_3, Hopper): one varlen call a level, through the ops that it registers."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ratoon.attention.alignment import round_up
from ratoon.attention.flash.levels import Level, OwnRuns, build_levels
from ratoon.attention.flash.merge import add_level, add_sinks, merge_level
from ratoon.attention.flash.padding import cut, kernel_ready
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan

HEAD_DIM_MULTIPLE = 8


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """See `ForwardKernel`. Head dims to 256."""
    v_head_dim = v_THE.shape[2]
    q_THD, k_THD, v_THD = _with_one_head_dim(q_THD, k_THD, v_THE)
    levels = plan.schedule(build_levels)
    out_THD, lse_HT = _forward_runs(q_THD, k_THD, v_THD, levels.own, scoring)
    if len(levels.ancestors) > 1:  # a row adds one part a level: its sum is rounded once
        out_THD = out_THD.to(lse_HT.dtype)
    for level in levels.ancestors:
        part_THD, part_lse_HT = _forward_runs(q_THD, k_THD, v_THD, level, scoring)
        merge_level(out_THD, lse_HT, part_THD, part_lse_HT, level.reads_T)
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
    """See `BackwardKernel`. Deterministic where asked: the kernel's sums wait for their turn, and levels add in order.

    With the merged output and log-sum-exp, each level's kernel sees the probabilities of the whole row.
    """
    head_dim, v_head_dim = q_THD.shape[2], v_THE.shape[2]
    q_THD, k_THD, v_THD = _with_one_head_dim(q_THD, k_THD, v_THE)
    dout_THD, out_THD = (kernel_ready(x, q_THD.shape[2]) for x in (dout_THE, out_THE))
    lse_HT = lse_HT.contiguous()
    levels = plan.schedule(build_levels)

    def gradients(runs: OwnRuns | Level) -> tuple[Tensor, Tensor, Tensor]:
        dq_THD, dk_THD, dv_THD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_THD, v_THD))
        cu_q, cu_k, used_q, used_k, max_q, max_k = _runs(runs)
        _ops().bwd(
            *(dout_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, dq_THD, dk_THD, dv_THD),
            *(cu_q, cu_k, used_q, used_k, max_q, max_k, scoring.softmax_scale, isinstance(runs, OwnRuns)),
            *(-1, -1),  # no window
            *(scoring.softcap or 0.0, deterministic),
            0,  # SMs left to others
        )
        return dq_THD, dk_THD, dv_THD

    dq_THD, dk_THD, dv_THD = gradients(levels.own)
    if len(levels.ancestors) > 1:
        # A row adds one part a level; a key adds two parts at most, whatever the depth.
        dq_THD = dq_THD.to(lse_HT.dtype)
    for level in levels.ancestors:
        dq_part_THD, dk_part_THD, dv_part_THD = gradients(level)
        add_level(dq_THD, dq_part_THD, level.reads_T)
        add_level(dk_THD, dk_part_THD, level.is_read_T)
        add_level(dv_THD, dv_part_THD, level.is_read_T)
    return cut(dq_THD, head_dim).to(q_THD.dtype), cut(dk_THD, head_dim), cut(dv_THD, v_head_dim)


def _with_one_head_dim(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = round_up(max(q_THD.shape[2], v_THE.shape[2]), HEAD_DIM_MULTIPLE)
    return kernel_ready(q_THD, head_dim), kernel_ready(k_THD, head_dim), kernel_ready(v_THE, head_dim)


def _forward_runs(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, runs: OwnRuns | Level, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """-> [T, Hq, D], [Hq, T]; rows outside the runs hold anything."""
    cu_q, cu_k, used_q, used_k, max_q, max_k = _runs(runs)
    out_THD, lse_HT, *_ = _ops().fwd(
        *(q_THD, k_THD, v_THD),
        *(None, None, None, None),  # new keys and values, a second query, the output's memory
        *(cu_q, cu_k, None, used_q, used_k, max_q, max_k),
        *(None, None, None),  # pages, which batch, padding at the left
        *(None, None, None),  # rotary
        *(None, None, None),  # scales of fp8
        *(scoring.softmax_scale, isinstance(runs, OwnRuns)),
        *(-1, -1, 0),  # no window, no chunks
        scoring.softcap or 0.0,
        True,  # interleaved rotary, of which there is none
        None,  # a schedule made beforehand
        1,  # parts of a row's keys
        None,  # whether query heads share tiles: the kernel's choice
        0,  # SMs left to others
    )
    return out_THD, lse_HT


def _runs(runs: OwnRuns | Level) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int]:
    """Starts of queries and of keys, their numbers, and the longest run of each."""
    if isinstance(runs, OwnRuns):
        return runs.offsets, runs.offsets, None, None, runs.max_rows, runs.max_rows
    return runs.query_starts, runs.key_starts, runs.num_queries, runs.num_keys, runs.max_queries, runs.max_keys


@cache
def _ops() -> Any:
    """What the package registers as it is imported. Torch's switch to FA3 calls the same, without lengths."""
    import_module("flash_attn_interface")
    return torch.ops.flash_attn_3
