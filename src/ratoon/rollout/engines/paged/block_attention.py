"""Attention over a paged cache in blocks: a prompt's blocks are shared, a response's own follow them."""

# Shape letters: R rows of a pass, B rows that decode, U prompts they continue, X blocks of one table row, n queries and
# T keys of one sequence, Z sequences, H query heads, K key heads, G query heads of one key head, D head dim.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from ratoon.rollout.engines.paged.runner import DecodeRows

BLOCK_ATTENTION = "ratoon_paged_blocks"
"""Name under which transformers finds `block_attention`."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer."""

    k_cache: Tensor
    """[num_blocks, K, block, D]."""

    v_cache: Tensor
    """[num_blocks, K, block, Dv]."""


class BlockCache:
    """Keys and values of all layers; a layer's are made, as zeros, in the shape and dtype it first writes."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._layers: dict[int, LayerCache] = {}

    def layer(self, index: int, k_RKD: Tensor, v_RKD: Tensor) -> LayerCache:
        """The cache of a layer that writes such keys and values."""
        if index not in self._layers:
            self._layers[index] = LayerCache(self._made_for(k_RKD), self._made_for(v_RKD))
        return self._layers[index]

    def _made_for(self, x_RKD: Tensor) -> Tensor:
        _, num_heads, width = x_RKD.shape
        return x_RKD.new_zeros(self.num_blocks, num_heads, self.block_tokens, width)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What one attention layer does to its scores."""

    scale: float
    window: int | None
    """A query reads the keys at most `window - 1` positions before it; None: all."""

    softcap: float | None
    sinks_H: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """`DecodeRows` on the model's device; all int64."""

    prompt_of_B: Tensor
    prompt_table_UX: Tensor
    num_prompt_keys_U: Tensor
    own_table_BX: Tensor
    num_own_keys_B: Tensor

    @classmethod
    def of(cls, rows: DecodeRows, device: torch.device) -> "DecodeTables":
        arrays = (
            rows.prompt_of_B,
            rows.prompt_table_UX,
            rows.num_prompt_keys_U,
            rows.own_table_BX,
            rows.num_own_keys_B,
        )
        return cls(*(torch.from_numpy(array).to(device, torch.int64) for array in arrays))


@dataclass(frozen=True, slots=True)
class PieceReads:
    """The keys of one piece of a prefill pass: its rows are the last of them."""

    first_row: int
    end_row: int
    block_T: Tensor
    """[T] int64. Block of each key, in order of position."""

    offset_T: Tensor
    """[T] int64. Its place in the block."""


@dataclass(frozen=True, slots=True)
class PagedPass:
    """What attention needs to know of one forward pass."""

    cache: BlockCache
    write_block_R: Tensor
    """[R] int64. Where each row's key goes."""

    write_offset_R: Tensor
    reads: DecodeTables | tuple[PieceReads, ...]


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface, for the packed rows of one pass.

    query: [1, H, R, D]. key, value: [1, K, R, D]; they enter the cache before it is read.
    Keywords taken: `paged_pass` (from the engine), and the layer's own `sliding_window`, `softcap` and `s_aux` (sinks).

    Returns [1, R, H, Dv] in the query's dtype, and no weights. Scores and softmax are float32, float64 for such models.
    """
    paged_pass = kwargs["paged_pass"]
    assert isinstance(paged_pass, PagedPass), f"block attention needs a pass, got {type(paged_pass).__name__}"
    assert attention_mask is None, "block attention derives its mask from the tables, got one from the model"
    layer_index = module.layer_idx
    assert isinstance(layer_index, int), f"{type(module).__name__} does not know its layer's index"
    rule = ScoreRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )
    q_RHD, k_RKD, v_RKD = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = paged_pass.cache.layer(layer_index, k_RKD, v_RKD)
    layer.k_cache[paged_pass.write_block_R, :, paged_pass.write_offset_R] = k_RKD
    layer.v_cache[paged_pass.write_block_R, :, paged_pass.write_offset_R] = v_RKD
    if isinstance(paged_pass.reads, DecodeTables):
        return decode_attention(q_RHD, layer.k_cache, layer.v_cache, paged_pass.reads, rule)[None], None
    return prefill_attention(q_RHD, layer.k_cache, layer.v_cache, paged_pass.reads, rule)[None], None


def decode_attention(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, tables: DecodeTables, rule: ScoreRule) -> Tensor:
    """One query a response over its prompt's keys and its own, in one softmax. [B, H, D] -> [B, H, Dv].

    k_cache: [num_blocks, K, block, D], v_cache: [num_blocks, K, block, Dv], which hold the queries' own keys.

    This is the definition, in gathers: every response gathers its prompt's keys.
    """
    num_prompt_keys_B = tables.num_prompt_keys_U[tables.prompt_of_B]
    prompt_table_BX = tables.prompt_table_UX[tables.prompt_of_B]
    k_BTKD = torch.cat([_gathered(k_cache, prompt_table_BX), _gathered(k_cache, tables.own_table_BX)], dim=1)
    v_BTKD = torch.cat([_gathered(v_cache, prompt_table_BX), _gathered(v_cache, tables.own_table_BX)], dim=1)
    block_tokens = k_cache.shape[2]
    index_1P = torch.arange(prompt_table_BX.shape[1] * block_tokens, device=q_BHD.device)[None]
    index_1R = torch.arange(tables.own_table_BX.shape[1] * block_tokens, device=q_BHD.device)[None]
    in_prompt_BP = index_1P < num_prompt_keys_B[:, None]
    is_own_BR = index_1R < tables.num_own_keys_B[:, None]
    if rule.window is not None:
        query_B1 = (num_prompt_keys_B + tables.num_own_keys_B - 1)[:, None]
        in_prompt_BP &= query_B1 - index_1P < rule.window
        is_own_BR &= query_B1 - (num_prompt_keys_B[:, None] + index_1R) < rule.window
    mask_BT = torch.cat([in_prompt_BP, is_own_BR], dim=1)
    return _attend(q_BHD[:, None], k_BTKD, v_BTKD, mask_BT[:, None], rule)[:, 0]


def prefill_attention(
    q_RHD: Tensor, k_cache: Tensor, v_cache: Tensor, pieces: Sequence[PieceReads], rule: ScoreRule
) -> Tensor:
    """Causal attention of each piece's rows over the keys up to them. [R, H, D] -> [R, H, Dv]."""
    out_RHD = q_RHD.new_empty(*q_RHD.shape[:2], v_cache.shape[3])
    for piece in pieces:
        q_nHD = q_RHD[piece.first_row : piece.end_row]
        k_TKD = k_cache[piece.block_T, :, piece.offset_T]
        v_TKD = v_cache[piece.block_T, :, piece.offset_T]
        num_queries, num_keys = q_nHD.shape[0], k_TKD.shape[0]
        query_n1 = torch.arange(num_keys - num_queries, num_keys, device=q_RHD.device)[:, None]
        key_1T = torch.arange(num_keys, device=q_RHD.device)[None]
        mask_nT = key_1T <= query_n1
        if rule.window is not None:
            mask_nT &= query_n1 - key_1T < rule.window
        attend = _attend if rule.softcap is not None or rule.sinks_H is not None else _attend_fused
        out_RHD[piece.first_row : piece.end_row] = attend(q_nHD[None], k_TKD[None], v_TKD[None], mask_nT[None], rule)[0]
    return out_RHD


def _gathered(cache: Tensor, table_BX: Tensor) -> Tensor:
    """[num_blocks, K, block, D] -> [B, X * block, K, D]."""
    return cache[table_BX].transpose(2, 3).flatten(1, 2)


def _attend(q_ZnHD: Tensor, k_ZTKD: Tensor, v_ZTKD: Tensor, mask_ZnT: Tensor, rule: ScoreRule) -> Tensor:
    """[Z, n, H, D] -> [Z, n, H, Dv], scores and softmax at least float32."""
    num_key_heads = k_ZTKD.shape[2]
    dtype = torch.promote_types(q_ZnHD.dtype, torch.float32)
    q_ZnKGD = q_ZnHD.to(dtype).unflatten(2, (num_key_heads, -1))
    scores_ZKGnT = torch.einsum("znkgd,ztkd->zkgnt", q_ZnKGD, k_ZTKD.to(dtype)) * rule.scale
    if rule.softcap is not None:
        scores_ZKGnT = torch.tanh(scores_ZKGnT / rule.softcap) * rule.softcap
    scores_ZKGnT.masked_fill_(~mask_ZnT[:, None, None], float("-inf"))
    if rule.sinks_H is None:
        probs_ZKGnT = torch.softmax(scores_ZKGnT, dim=-1)
    else:
        sinks_KG11 = rule.sinks_H.to(dtype).view(num_key_heads, -1, 1, 1)
        sinks_ZKGn1 = sinks_KG11.expand(*scores_ZKGnT.shape[:1], -1, -1, scores_ZKGnT.shape[3], 1)
        probs_ZKGnT = torch.softmax(torch.cat([scores_ZKGnT, sinks_ZKGn1], dim=-1), dim=-1)[..., :-1]
    out_ZnKGD = torch.einsum("zkgnt,ztkd->znkgd", probs_ZKGnT, v_ZTKD.to(dtype))
    return out_ZnKGD.flatten(2, 3).to(q_ZnHD.dtype)


def _attend_fused(q_ZnHD: Tensor, k_ZTKD: Tensor, v_ZTKD: Tensor, mask_ZnT: Tensor, rule: ScoreRule) -> Tensor:
    """`_attend` for scores that are only scaled, by kernels that hold no [n, T] scores."""
    num_groups = q_ZnHD.shape[2] // k_ZTKD.shape[2]
    k_ZHTD, v_ZHTD = (x.transpose(1, 2).repeat_interleave(num_groups, dim=1) for x in (k_ZTKD, v_ZTKD))
    out_ZHnD = functional.scaled_dot_product_attention(
        q_ZnHD.transpose(1, 2), k_ZHTD, v_ZHTD, attn_mask=mask_ZnT[:, None], scale=rule.scale
    )
    return out_ZHnD.transpose(1, 2)


AttentionInterface.register(BLOCK_ATTENTION, block_attention)
