"""The eager implementation: the expiry rule as a mask, a block of rows at a time, on any device."""

# Shape letters: T rows, B rows of a block, K keys of a block, H heads (Hq query, Hkv key and value),
# G query heads of one key head, D head dim, E value head dim.

import torch
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.row_blocks import RowBlock, build_row_blocks


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """A `ForwardKernel`. Computes in fp32, in fp64 for fp64."""
    dtype = _compute_dtype(q_THD)
    num_rows, num_heads, _ = q_THD.shape
    num_kv_heads = k_THD.shape[1]
    out_THE = q_THD.new_empty(num_rows, num_heads, v_THE.shape[2])
    lse_HT = q_THD.new_empty(num_heads, num_rows, dtype=dtype)
    for block in plan.schedule(build_row_blocks):
        rows = slice(block.start, block.end)
        mask_BK = _mask(plan, block)
        k_H1KD, v_H1KE, bad_HK = _keys_and_values(k_THD, v_THE, block, dtype)
        q_HGBD = _by_key_head(q_THD[rows].to(dtype), num_kv_heads)
        scores_HGBK = _scores(q_HGBD, k_H1KD, scoring).masked_fill(~mask_BK, -torch.inf)
        lse_HGB1 = scores_HGBK.logsumexp(dim=-1, keepdim=True)
        if sinks_H is not None:
            # A sink takes its share of the probability and gives no value.
            lse_HGB1 = torch.logaddexp(lse_HGB1, sinks_H.to(dtype).view(num_kv_heads, -1, 1, 1))
        out_HGBE = torch.matmul(_probabilities(scores_HGBK, lse_HGB1), v_H1KE)
        out_HGBE.masked_fill_(_reads_bad(mask_BK, bad_HK), torch.nan)
        out_THE[rows] = out_HGBE.permute(2, 0, 1, 3).flatten(1, 2)
        lse_HT[:, rows] = lse_HGB1.flatten(0, 1)[..., 0]
    return out_THE, lse_HT


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
    """A `BackwardKernel`, bitwise reproducible always: blocks follow one another."""
    dtype = _compute_dtype(q_THD)
    num_kv_heads = k_THD.shape[1]
    dq_THD = torch.empty_like(q_THD)
    # Many blocks add to one key: sum in the dtype of the computation.
    dk_THD = torch.zeros_like(k_THD, dtype=dtype)
    dv_THE = torch.zeros_like(v_THE, dtype=dtype)
    for block in plan.schedule(build_row_blocks):
        rows = slice(block.start, block.end)
        mask_BK = _mask(plan, block)
        hidden_BK = ~mask_BK
        k_H1KD, v_H1KE, bad_HK = _keys_and_values(k_THD, v_THE, block, dtype)
        q_HGBD, dout_HGBE = (_by_key_head(x[rows].to(dtype), num_kv_heads) for x in (q_THD, dout_THE))
        lse_HGB1 = lse_HT[:, rows].view(num_kv_heads, -1, block.end - block.start, 1)
        scores_HGBK = _scores(q_HGBD, k_H1KD, scoring)
        # Hidden pairs are zeroed, not multiplied by zero: a row that is not finite must stay alone.
        probs_HGBK = _probabilities(scores_HGBK.masked_fill(hidden_BK, -torch.inf), lse_HGB1)
        probs_HGBK = probs_HGBK.masked_fill(_reads_bad(mask_BK, bad_HK), torch.nan).masked_fill(hidden_BK, 0.0)
        dprobs_HGBK = torch.matmul(dout_HGBE, v_H1KE.mT)
        # Fused kernels take this mean from the output, which was rounded.
        mean_HGB1 = (probs_HGBK * dprobs_HGBK).sum(dim=-1, keepdim=True)
        dscores_HGBK = probs_HGBK * (dprobs_HGBK - mean_HGB1) * scoring.softmax_scale
        if scoring.softcap is not None:
            dscores_HGBK *= 1 - (scores_HGBK / scoring.softcap).square()
        dscores_HGBK = dscores_HGBK.masked_fill(hidden_BK, 0.0)
        dq_THD[rows] = torch.matmul(dscores_HGBK, k_H1KD).permute(2, 0, 1, 3).flatten(1, 2)
        _scatter_add(dk_THD, _sum_over_rows(dscores_HGBK, q_HGBD), block)
        _scatter_add(dv_THE, _sum_over_rows(probs_HGBK, dout_HGBE), block)
    return dq_THD, dk_THD.to(k_THD.dtype), dv_THE.to(v_THE.dtype)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _by_key_head(tensor_BHD: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, D] -> [Hkv, G, B, D]."""
    return tensor_BHD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _keys_and_values(
    k_THD: Tensor, v_THE: Tensor, block: RowBlock, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """-> [Hkv, 1, K, D], [Hkv, 1, K, E], and [Hkv, K] bool: which were not finite.

    A probability of 0 times NaN is NaN: what is not finite becomes 0, and the rows that read it are told.
    """
    k_H1KD = _gather(k_THD, block).to(dtype).transpose(0, 1)[:, None]
    v_H1KE = _gather(v_THE, block).to(dtype).transpose(0, 1)[:, None]
    bad_HK = ~(k_H1KD.isfinite().all(dim=3)[:, 0] & v_H1KE.isfinite().all(dim=3)[:, 0])
    return k_H1KD.nan_to_num(0.0, 0.0, 0.0), v_H1KE.nan_to_num(0.0, 0.0, 0.0), bad_HK


def _reads_bad(mask_BK: Tensor, bad_HK: Tensor) -> Tensor:
    """[Hkv, 1, B, 1] bool: which rows read a key that was not finite."""
    return (mask_BK & bad_HK[:, None]).any(dim=2)[:, None, :, None]


def _scores(q_HGBD: Tensor, k_H1KD: Tensor, scoring: Scoring) -> Tensor:
    """[Hkv, G, B, K], of hidden pairs too."""
    scores_HGBK = torch.matmul(q_HGBD, k_H1KD.mT) * scoring.softmax_scale
    return scores_HGBK if scoring.softcap is None else torch.tanh(scores_HGBK / scoring.softcap) * scoring.softcap


def _probabilities(scores_HGBK: Tensor, lse_HGB1: Tensor) -> Tensor:
    """exp(scores - lse), where the keys are all of their rows' keys.

    By the keys' own softmax, which rounds less than a difference from a log-sum-exp; a sink leaves them a share.
    """
    return scores_HGBK.softmax(dim=-1) * torch.exp(scores_HGBK.logsumexp(dim=-1, keepdim=True) - lse_HGB1)


def _sum_over_rows(weights_HGBK: Tensor, tensor_HGBD: Tensor) -> Tensor:
    """[K, Hkv, D]: each key's sum over the rows and query heads that read it."""
    return torch.matmul(weights_HGBK.flatten(1, 2).mT, tensor_HGBD.flatten(1, 2)).transpose(0, 1)


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
