"""The eager implementation: the expiry rule as a mask, a block of rows at a time, on any device."""

# Shape letters: T rows, B rows of a block, K keys of a block, H heads (Hq query, Hkv key and value),
# G query heads of one key head, D head dim, E value head dim.

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.row_blocks import RowBlock, build_row_blocks


def reference_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[T, Hq, E] in q's dtype. Computes in fp32, in fp64 for fp64; keeps no scores for the backward pass."""
    return _ReferenceAttention.apply(q_THD, k_THD, v_THE, sinks_H, plan, softmax_scale, softcap)


def _without_autocast(q_THD: Tensor) -> torch.autocast:
    """The dtype of the computation is ours to choose, in the backward pass too."""
    return torch.autocast(q_THD.device.type, enabled=False)


class _ReferenceAttention(torch.autograd.Function):
    """Block by block in both directions; a block's gradient is autograd's, of the block computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THE: Tensor,
        sinks_H: Tensor | None,
        plan: AttentionPlan,
        softmax_scale: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_THD, v_THE, sinks_H)
        ctx.plan, ctx.softmax_scale, ctx.softcap = plan, softmax_scale, softcap
        out_THE = q_THD.new_empty(*q_THD.shape[:2], v_THE.shape[2])
        for block in plan.schedule(build_row_blocks):
            with _without_autocast(q_THD):
                out_THE[block.start : block.end] = _attend_block(
                    q_THD[block.start : block.end],
                    _gather(k_THD, block),
                    _gather(v_THE, block),
                    sinks_H,
                    _mask(plan, block),
                    softmax_scale,
                    softcap,
                )
        return out_THE

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout_THE: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_THD, k_THD, v_THE, sinks_H = ctx.saved_tensors
        compute_dtype = _compute_dtype(q_THD)
        dq_THD = torch.empty_like(q_THD)
        # Many blocks add to one key: sum in the dtype of the computation.
        dk_THD = torch.zeros_like(k_THD, dtype=compute_dtype)
        dv_THE = torch.zeros_like(v_THE, dtype=compute_dtype)
        dsinks_H = None if sinks_H is None else torch.zeros_like(sinks_H, dtype=compute_dtype)
        for block in ctx.plan.schedule(build_row_blocks):
            leaves = [q_THD[block.start : block.end], _gather(k_THD, block), _gather(v_THE, block)]
            leaves += [] if sinks_H is None else [sinks_H]
            leaves = [leaf.detach().to(compute_dtype).requires_grad_() for leaf in leaves]
            with torch.enable_grad(), _without_autocast(q_THD):
                out_BHE = _attend_block(
                    leaves[0],
                    leaves[1],
                    leaves[2],
                    None if sinks_H is None else leaves[3],
                    _mask(ctx.plan, block),
                    ctx.softmax_scale,
                    ctx.softcap,
                )
                dout_BHE = dout_THE[block.start : block.end].to(compute_dtype)
                block_grads = torch.autograd.grad(out_BHE, leaves, dout_BHE)
            dq_THD[block.start : block.end] = block_grads[0]
            _scatter_add(dk_THD, block_grads[1], block)
            _scatter_add(dv_THE, block_grads[2], block)
            if dsinks_H is not None:
                dsinks_H += block_grads[3]
        return (
            dq_THD,
            dk_THD.to(k_THD.dtype),
            dv_THE.to(v_THE.dtype),
            None if dsinks_H is None or sinks_H is None else dsinks_H.to(sinks_H.dtype),
            None,
            None,
            None,
        )


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _attend_block(
    q_BHD: Tensor,
    k_KHD: Tensor,
    v_KHE: Tensor,
    sinks_H: Tensor | None,
    mask_BK: Tensor,
    softmax_scale: float,
    softcap: float | None,
) -> Tensor:
    """[B, Hq, E] in the dtype of the computation."""
    dtype = _compute_dtype(q_BHD)
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads = k_KHD.shape[1]
    q_HGBD = q_BHD.to(dtype).view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k_H1DK = k_KHD.to(dtype).permute(1, 2, 0)[:, None]
    v_H1KE = v_KHE.to(dtype).transpose(0, 1)[:, None]
    # A probability of 0 times NaN is NaN: keys and values that are not finite are put back as NaN below, in the
    # rows that read them.
    bad_HK = ~(k_H1DK.isfinite().all(dim=2)[:, 0] & v_H1KE.isfinite().all(dim=3)[:, 0])
    k_H1DK, v_H1KE = k_H1DK.nan_to_num(0.0, 0.0, 0.0), v_H1KE.nan_to_num(0.0, 0.0, 0.0)
    scores_HGBK = torch.matmul(q_HGBD, k_H1DK) * softmax_scale
    if softcap is not None:
        scores_HGBK = torch.tanh(scores_HGBK / softcap) * softcap
    scores_HGBK = scores_HGBK.masked_fill(~mask_BK, -torch.inf)
    if sinks_H is not None:
        sinks_HGB1 = sinks_H.to(dtype).view(num_kv_heads, -1, 1, 1).expand(*scores_HGBK.shape[:3], 1)
        # A sink takes its share of the probability and gives no value.
        probs_HGBK = torch.cat([scores_HGBK, sinks_HGB1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs_HGBK = scores_HGBK.softmax(dim=-1)
    out_HGBE = torch.matmul(probs_HGBK, v_H1KE)
    reads_bad_HB = (mask_BK & bad_HK[:, None]).any(dim=2)
    spoilt_HB = torch.zeros_like(reads_bad_HB, dtype=dtype).masked_fill(reads_bad_HB, torch.nan)
    out_HGBE = out_HGBE + spoilt_HB[:, None, :, None]
    return out_HGBE.permute(2, 0, 1, 3).reshape(num_rows, num_heads, -1)


def _mask(plan: AttentionPlan, block: RowBlock) -> Tensor:
    """[B, K] bool. True where the row reads the key."""
    row_B1 = torch.arange(block.start, block.end, device=plan.device)[:, None]
    key_K = torch.cat([torch.arange(first, stop, device=plan.device) for first, stop in block.key_ranges])
    mask_BK = (key_K <= row_B1) & (row_B1 < _gather(plan.expiry_T, block))
    if plan.window is not None:
        position_B1 = plan.positions_T[block.start : block.end, None]
        mask_BK &= position_B1 - _gather(plan.positions_T, block) < plan.window
    return mask_BK


def _gather(tensor: Tensor, block: RowBlock) -> Tensor:
    """The block's keys along dim 0: a view where they are one range."""
    parts = [tensor[first:stop] for first, stop in block.key_ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scatter_add(total: Tensor, part: Tensor, block: RowBlock) -> None:
    """Adds what belongs to the block's keys to `total`, in place."""
    done = 0
    for first, stop in block.key_ranges:
        total[first:stop] += part[done : done + stop - first]
        done += stop - first
