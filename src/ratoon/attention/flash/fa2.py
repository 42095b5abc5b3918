"""PyTorch's own FlashAttention-2 varlen kernels: one call a level, nothing to install. Half precision, CUDA."""

# Shape letters: T rows, L rows of a level, H heads (Hq query, Hkv key and value), D head dim.

import torch
from torch import Tensor

from ratoon.attention.flash.merged import MergedRows
from ratoon.attention.flash.schedule import Rows, VarlenLevel, VarlenSchedule

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def forward(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, schedule: VarlenSchedule, softmax_scale: float) -> MergedRows:
    """Output in fp32 where levels were merged, else in q's dtype.

    Every row of a level has a key there, so that no log-sum-exp is infinite.
    """
    out_THD, lse_HT, dropout_state = _forward_level(q_THD, k_THD, v_THD, schedule.own, softmax_scale, is_causal=True)
    if schedule.ancestors:
        out_THD = out_THD.to(lse_HT.dtype)
    for level in schedule.ancestors:
        part_LHD, part_lse_HL, _ = _forward_level(q_THD, k_THD, v_THD, level, softmax_scale, is_causal=False)
        rows = level.query_rows
        lse_HL = lse_HT[:, rows]
        weight_LH = torch.sigmoid(part_lse_HL - lse_HL).T
        out_THD[rows] = torch.lerp(out_THD[rows], part_LHD.to(out_THD.dtype), weight_LH[..., None])
        lse_HT[:, rows] = torch.logaddexp(lse_HL, part_lse_HL)
    return MergedRows(out_THD, lse_HT.T, dropout_state)


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    merged: MergedRows,
    schedule: VarlenSchedule,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (fp32 where levels were summed), k and v.

    With the merged output and log-sum-exp, each part's kernel sees the probabilities of the whole row.
    """
    lse_HT = merged.lse_TH.T

    def level_gradients(level: VarlenLevel, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        rows, key_rows = level.query_rows, level.key_rows
        return _backward(
            *(_take(dout_THD, rows), _take(q_THD, rows), _take(k_THD, key_rows), _take(v_THD, key_rows)),
            *(_take(merged.out_THD, rows), lse_HT[:, rows].contiguous()),
            *(level.cu_seqlens_q, level.cu_seqlens_k, level.max_seqlen_q, level.max_seqlen_k),
            *(0.0, is_causal, *merged.dropout_state),
            scale=softmax_scale,
        )

    dq_THD, dk_THD, dv_THD = level_gradients(schedule.own, is_causal=True)
    if schedule.ancestors:
        # A row adds one part a level; a key adds two parts at most, whatever the depth.
        dq_THD = dq_THD.to(lse_HT.dtype)
    for level in schedule.ancestors:
        dq_LHD, dk_LHD, dv_LHD = level_gradients(level, is_causal=False)
        _add(dq_THD, level.query_rows, dq_LHD)
        _add(dk_THD, level.key_rows, dk_LHD)
        _add(dv_THD, level.key_rows, dv_LHD)
    return dq_THD, dk_THD, dv_THD


def _forward_level(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, level: VarlenLevel, softmax_scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """-> [L, Hq, D], [Hq, L], dropout state."""
    out_LHD, lse_HL, rng_state, unused, _ = _forward(
        *(_take(q_THD, level.query_rows), _take(k_THD, level.key_rows), _take(v_THD, level.key_rows)),
        *(level.cu_seqlens_q, level.cu_seqlens_k, level.max_seqlen_q, level.max_seqlen_k),
        *(0.0, is_causal, False),
        scale=softmax_scale,
    )
    assert lse_HL.shape == (out_LHD.shape[1], out_LHD.shape[0]), (
        f"this torch lays the log-sum-exp out as {tuple(lse_HL.shape)}, not [heads, rows]"
    )
    return out_LHD, lse_HL, (rng_state, unused)


def _take(tensor: Tensor, rows: Rows) -> Tensor:
    """A view of contiguous rows, a copy of others."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _add(total: Tensor, rows: Rows, part: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += part
    else:  # each row is there once, so the order of the adds cannot matter
        total.index_add_(0, rows, part.to(total.dtype))
