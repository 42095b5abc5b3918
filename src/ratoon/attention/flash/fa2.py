"""PyTorch's own FlashAttention-2 varlen kernels: one call a level, nothing to install. Half precision, CUDA."""

# Shape letters: T rows, K keys of a level, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

import torch
from torch import Tensor

from ratoon.attention.alignment import round_up
from ratoon.attention.flash.levels import CoveringLevel, OwnRuns, build_covering_levels
from ratoon.attention.flash.merge import add_level, add_sinks, merge_level
from ratoon.attention.flash.padding import cut, kernel_ready
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan

HEAD_DIM_MULTIPLE = 8

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """See `ForwardKernel`. Head dims to 256."""
    v_head_dim = v_THE.shape[2]
    q_THD, k_THD, v_THD = _with_one_head_dim(q_THD, k_THD, v_THE)
    levels = plan.schedule(build_covering_levels)
    out_THD, lse_HT = _forward_level(q_THD, k_THD, v_THD, levels.own, scoring)
    if len(levels.ancestors) > 1:  # a row adds one part a level: its sum is rounded once
        out_THD = out_THD.to(lse_HT.dtype)
    for level in levels.ancestors:
        k_KHD, v_KHD = _take(k_THD, level.key_rows), _take(v_THD, level.key_rows)
        part_THD, part_lse_HT = _forward_level(q_THD, k_KHD, v_KHD, level, scoring)
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
    """See `BackwardKernel`. Sums dq by atomics, so it is never deterministic.

    With the merged output and log-sum-exp, each level's kernel sees the probabilities of the whole row.
    """
    assert not deterministic, "FA2 sums dq in an order that changes from run to run"
    head_dim, v_head_dim = q_THD.shape[2], v_THE.shape[2]
    q_THD, k_THD, v_THD = _with_one_head_dim(q_THD, k_THD, v_THE)
    dout_THD, out_THD = (kernel_ready(x, q_THD.shape[2]) for x in (dout_THE, out_THE))
    lse_HT = lse_HT.contiguous()
    levels = plan.schedule(build_covering_levels)

    def gradients(k_KHD: Tensor, v_KHD: Tensor, runs: OwnRuns | CoveringLevel) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(
            *(dout_THD, q_THD, k_KHD, v_KHD, out_THD, lse_HT, *_runs(runs)),
            *(0.0, isinstance(runs, OwnRuns), *_dropout_state(q_THD.device)),
            scale=scoring.softmax_scale,
        )

    dq_THD, dk_THD, dv_THD = gradients(k_THD, v_THD, levels.own)
    if len(levels.ancestors) > 1:
        # A row adds one part a level; a key adds two parts at most, whatever the depth.
        dq_THD = dq_THD.to(lse_HT.dtype)
    for level in levels.ancestors:
        k_KHD, v_KHD = _take(k_THD, level.key_rows), _take(v_THD, level.key_rows)
        dq_part_THD, dk_KHD, dv_KHD = gradients(k_KHD, v_KHD, level)
        add_level(dq_THD, dq_part_THD, level.reads_T)
        _add_rows(dk_THD, level.key_rows, dk_KHD)
        _add_rows(dv_THD, level.key_rows, dv_KHD)
    return cut(dq_THD, head_dim).to(q_THD.dtype), cut(dk_THD, head_dim), cut(dv_THD, v_head_dim)


def _with_one_head_dim(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = round_up(max(q_THD.shape[2], v_THE.shape[2]), HEAD_DIM_MULTIPLE)
    return kernel_ready(q_THD, head_dim), kernel_ready(k_THD, head_dim), kernel_ready(v_THE, head_dim)


def _forward_level(
    q_THD: Tensor, k_KHD: Tensor, v_KHD: Tensor, runs: OwnRuns | CoveringLevel, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """-> [T, Hq, D], [Hq, T]."""
    out_THD, lse_HT, *_ = _forward(
        *(q_THD, k_KHD, v_KHD, *_runs(runs)),
        *(0.0, isinstance(runs, OwnRuns), False),
        scale=scoring.softmax_scale,
    )
    assert lse_HT.shape == (out_THD.shape[1], out_THD.shape[0]), (
        f"this torch lays the log-sum-exp out as {tuple(lse_HT.shape)}, not [heads, rows]"
    )
    return out_THD, lse_HT


def _runs(runs: OwnRuns | CoveringLevel) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of queries and of keys, and the longest run of each.

    For a longest run of one query torch regroups query heads that share a key head, as if every run had one.
    """
    if isinstance(runs, OwnRuns):
        return runs.offsets, runs.offsets, max(runs.max_rows, 2), runs.max_rows
    return runs.query_offsets, runs.key_offsets, max(runs.max_queries, 2), runs.max_keys


def _dropout_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the backward kernel would draw from under dropout. It is never on, but the kernel must be given it."""
    return torch.empty(2, dtype=torch.uint64, device=device), torch.empty((), dtype=torch.uint64, device=device)


def _take(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """A view of rows that lie together, a copy of others."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _add_rows(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:  # each row is there once, so the order of the adds cannot matter
        total.index_add_(0, rows, part)
