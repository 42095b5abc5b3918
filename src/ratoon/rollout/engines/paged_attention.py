"""Attention over transformers' paged cache: the keys of a prompt are read once for all its responses.

The stock `paged|sdpa` masks every request against the keys of all requests, so its cost grows with the square of the
requests in a batch.
"""

# Shape letters: B single-token requests, U prompts they continue, N most of them to one prompt, Q query tokens of one
# request, T keys, H query heads, K key heads, G query heads of one key head, D head dim.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ratoon.rollout.engines.reads import BatchReads, LayerReads, SharedReads

PAGED_ATTENTION = "ratoon_paged"
"""Name under which transformers finds `paged_attention`."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface, for packed requests over a paged cache.

    query: [1, H, rows, D]. key, value: [1, K, rows, D]; they enter the cache before it is read.
    Keywords taken: `cache`, `read_index`, `write_index` (from continuous batching), `batch_reads` (from the engine),
    and the layer's own `softcap` and `s_aux` (sinks). The window of a sliding layer is the cache's.

    Returns [1, rows, H, D] in the query's dtype, and no weights. Scores and softmax are float32.
    """
    cache, reads = kwargs["cache"], kwargs["batch_reads"]
    assert isinstance(cache, PagedAttentionCache), f"paged attention needs a paged cache, got {type(cache).__name__}"
    assert isinstance(reads, BatchReads), f"paged attention needs the engine's plan, got {type(reads).__name__}"
    assert attention_mask is None, "paged attention derives its mask from the cache, got one from the model"
    layer_index = module.layer_idx
    assert isinstance(layer_index, int), f"{type(module).__name__} does not know its layer's index"
    group, place = cache.layer_index_to_group_indices[layer_index]
    window = cache.sliding_windows[layer_index]
    layer = _Layer(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=None if window == 1 else window,
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )
    if layer.window is None:
        k_TKD, v_TKD = cache.key_cache[place], cache.value_cache[place]
        k_TKD.index_copy_(0, kwargs["write_index"][group], key[0].transpose(0, 1))
        v_TKD.index_copy_(0, kwargs["write_index"][group], value[0].transpose(0, 1))
    else:
        # A window's cache is a ring that the new keys overwrite: the cache returns old and new ones together.
        k_TKD, v_TKD = cache.update(key, value, layer_index, kwargs["read_index"], kwargs["write_index"])
    return layer.attend(query[0].transpose(0, 1), k_TKD, v_TKD, reads.by_group[group])[None], None


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one attention layer does to its scores."""

    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    def attend(self, q_RHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reads: LayerReads) -> Tensor:
        """[rows, H, D] -> [rows, H, D]."""
        out_RHD = torch.zeros_like(q_RHD)
        if reads.rows_B.numel():
            q_BKGD = q_RHD[reads.rows_B].unflatten(1, (k_TKD.shape[1], -1))
            out_RHD[reads.rows_B] = self._single_tokens(q_BKGD, k_TKD, v_TKD, reads).flatten(1, 2)
        for first_row, end_row, slots_T in reads.longer:
            q_QHD = q_RHD[first_row:end_row]
            out_RHD[first_row:end_row] = self._one_request(q_QHD, k_TKD[slots_T], v_TKD[slots_T])
        return out_RHD

    def _single_tokens(self, q_BKGD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reads: LayerReads) -> Tensor:
        """Each row with the keys of its prompt and its own, in one softmax. -> [B, K, G, D]."""
        k_BKDT = k_TKD[reads.slots_BT].permute(0, 2, 3, 1)
        own_BKGT = self._scores(q_BKGD, k_BKDT, reads.mask_BT[:, None, None])
        shared = reads.shared
        if shared is None:
            probs_BKGT = self._softmax(own_BKGT)
            return torch.matmul(probs_BKGT.to(v_TKD.dtype), v_TKD[reads.slots_BT].transpose(1, 2))
        k_UKDT = k_TKD[shared.slots_UT].permute(0, 2, 3, 1)
        shared_UKLT = self._scores(_by_prompt(q_BKGD, shared), k_UKDT, shared.mask_UT[:, None, None])
        shared_BKGT = _by_request(shared_UKLT, q_BKGD.shape[2], shared)
        probs_BKGT = self._softmax(torch.cat([shared_BKGT, own_BKGT], dim=-1)).to(v_TKD.dtype)
        num_shared = shared_BKGT.shape[-1]
        v_UKTD = v_TKD[shared.slots_UT].transpose(1, 2)
        from_shared_UKLD = torch.matmul(_by_prompt(probs_BKGT[..., :num_shared], shared), v_UKTD)
        from_own_BKGD = torch.matmul(probs_BKGT[..., num_shared:], v_TKD[reads.slots_BT].transpose(1, 2))
        return _by_request(from_shared_UKLD, q_BKGD.shape[2], shared) + from_own_BKGD

    def _one_request(self, q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Causal attention of Q rows that are the last Q of T keys. -> [Q, H, D]."""
        Q, H, _ = q_QHD.shape
        T, num_key_heads, _ = k_TKD.shape
        query_Q1 = torch.arange(T - Q, T, device=q_QHD.device)[:, None]
        key_1T = torch.arange(T, device=q_QHD.device)[None]
        mask_QT = key_1T <= query_Q1
        if self.window is not None:
            mask_QT &= query_Q1 - key_1T < self.window
        q_HQD = q_QHD.transpose(0, 1)
        k_HTD, v_HTD = (x.transpose(0, 1).repeat_interleave(H // num_key_heads, dim=0) for x in (k_TKD, v_TKD))
        if self.softcap is None and self.sinks_H is None:
            # Three dims would take the slow path: the fused kernels want a batch.
            out_1HQD = functional.scaled_dot_product_attention(
                q_HQD[None], k_HTD[None], v_HTD[None], attn_mask=mask_QT, scale=self.scale
            )
            return out_1HQD[0].transpose(0, 1)
        scores_HQT = self._scores(q_HQD, k_HTD.transpose(1, 2), mask_QT)
        # Heads first and one row of queries a head: the shape that sinks are laid out for.
        probs_HQT = self._softmax(scores_HQT.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)
        return torch.matmul(probs_HQT.to(v_HTD.dtype), v_HTD).transpose(0, 1)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Scaled, capped, masked scores in float32; q: [..., D], k: [..., D, T]."""
        scores = torch.matmul(q.float(), k.float()) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.masked_fill_(~mask, float("-inf"))

    def _softmax(self, scores_BKGT: Tensor) -> Tensor:
        """Over the last dim, the layer's sinks taking their part. [B, K, G, T] -> [B, K, G, T]."""
        if self.sinks_H is None:
            return torch.softmax(scores_BKGT, dim=-1)
        B, num_key_heads, G, _ = scores_BKGT.shape
        sinks_BKG1 = self.sinks_H.float().view(1, num_key_heads, G, 1).expand(B, -1, -1, -1)
        return torch.softmax(torch.cat([scores_BKGT, sinks_BKG1], dim=-1), dim=-1)[..., :-1]


def _by_prompt(x_BKGX: Tensor, shared: SharedReads) -> Tensor:
    """[B, K, G, X] -> [U, K, N * G, X]: the rows of one prompt side by side."""
    return x_BKGX[shared.members_UN].transpose(1, 2).flatten(2, 3)


def _by_request(x_UKLX: Tensor, num_heads: int, shared: SharedReads) -> Tensor:
    """[U, K, N * G, X] -> [B, K, G, X], the inverse of `_by_prompt`; G is `num_heads`."""
    x_UNKGX = x_UKLX.unflatten(2, (-1, num_heads)).transpose(1, 2)
    return x_UNKGX.flatten(0, 1)[shared.place_of_B]


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
