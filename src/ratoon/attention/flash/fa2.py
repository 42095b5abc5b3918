"""PyTorch's own FlashAttention-2 varlen kernels: one call a level, nothing to install. Half precision, CUDA."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

import torch
from torch import Tensor

from ratoon.attention.flash.schedule import Rows, VarlenSchedule

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, schedule: VarlenSchedule, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """-> out [T, Hq, D] (fp32 where levels were merged, else q's dtype) and log-sum-exp [T, Hq] fp32.

    Every row reads itself, and no level has a node without keys, so that no log-sum-exp is infinite.
    """
    cu_seqlens, max_seqlen = schedule.cu_seqlens, schedule.max_seqlen
    out_THD, lse_HT = _forward(
        *(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        *(0.0, True, False),
        scale=softmax_scale,
    )[:2]
    if schedule.levels:
        out_THD = out_THD.float()
    for level in schedule.levels:
        part_THD, part_lse_HT = _forward(
            *(_take(q_THD, level.query_rows), _take(k_THD, level.key_rows), _take(v_THD, level.key_rows)),
            *(level.cu_seqlens_q, level.cu_seqlens_k, level.max_seqlen_q, level.max_seqlen_k),
            *(0.0, False, False),
            scale=softmax_scale,
        )[:2]
        rows = level.query_rows
        level_lse_HT = lse_HT[:, rows]
        weight_TH1 = torch.sigmoid(part_lse_HT - level_lse_HT).T[..., None]
        out_THD[rows] = torch.lerp(out_THD[rows], part_THD.float(), weight_TH1)
        lse_HT[:, rows] = torch.logaddexp(level_lse_HT, part_lse_HT)
    return out_THD, lse_HT.T


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    schedule: VarlenSchedule,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (fp32 where levels were summed), k and v.

    With the merged output and log-sum-exp, each part's kernel sees the probabilities of the whole row.
    """
    lse_HT = lse_TH.T.contiguous()
    # The kernels read a random state only under dropout, which is never on.
    no_dropout_state = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
    no_offset = torch.empty(0, dtype=torch.uint64, device=q_THD.device)
    cu_seqlens, max_seqlen = schedule.cu_seqlens, schedule.max_seqlen
    dq_THD, dk_THD, dv_THD = _backward(
        *(dout_THD, q_THD, k_THD, v_THD, out_THD, lse_HT),
        *(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        *(0.0, True, no_dropout_state, no_offset),
        scale=softmax_scale,
    )
    if schedule.levels:
        # A row adds one part a level; a key adds two parts at most, whatever the depth.
        dq_THD = dq_THD.float()
    for level in schedule.levels:
        rows, key_rows = level.query_rows, level.key_rows
        dq_part_THD, dk_part_THD, dv_part_THD = _backward(
            *(_take(dout_THD, rows), _take(q_THD, rows), _take(k_THD, key_rows), _take(v_THD, key_rows)),
            *(_take(out_THD, rows), lse_HT[:, rows].contiguous()),
            *(level.cu_seqlens_q, level.cu_seqlens_k, level.max_seqlen_q, level.max_seqlen_k),
            *(0.0, False, no_dropout_state, no_offset),
            scale=softmax_scale,
        )
        _add(dq_THD, rows, dq_part_THD)
        _add(dk_THD, key_rows, dk_part_THD)
        _add(dv_THD, key_rows, dv_part_THD)
    return dq_THD, dk_THD, dv_THD


def _take(tensor_THD: Tensor, rows: Rows) -> Tensor:
    """A view of contiguous rows, a copy of others."""
    return tensor_THD[rows] if isinstance(rows, slice) else tensor_THD.index_select(0, rows)


def _add(total_THD: Tensor, rows: Rows, part_THD: Tensor) -> None:
    if isinstance(rows, slice):
        total_THD[rows] += part_THD
    else:  # each row at most once: the order of the atomic adds cannot matter
        total_THD.index_add_(0, rows, part_THD.to(total_THD.dtype))
