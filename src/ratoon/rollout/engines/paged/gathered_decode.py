"""Decoding by its definition, in gathers: every response gathers its prompt's keys. For machines without kernels."""

# Shape letters: B rows that decode, U prompts they continue, X blocks of one table row, T keys of a row, H heads (Hq
# query, Hkv key and value), G query heads of one key head, D head dim, E value head dim.

import numpy as np
import torch
from torch import Tensor

from ratoon.rollout.engines.paged.block_attention import LayerRows
from ratoon.rollout.engines.paged.block_cache import LayerCache
from ratoon.rollout.engines.paged.runner import DecodeRows


class GatheredDecode:
    """An `Attention` of one row for each response: its prompt's keys and its own, in one softmax.

    Scores and softmax are float32, float64 for such models.
    """

    def __init__(self, rows: DecodeRows, block_tokens: int, device: torch.device) -> None:
        last_B = rows.num_own_keys_B - 1

        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, torch.int64)

        self._write_block_B = on_device(rows.own_table_BX[np.arange(last_B.size), last_B // block_tokens])
        self._write_offset_B = on_device(last_B % block_tokens)
        self._prompt_table_BX = on_device(rows.prompt_table_UX[rows.prompt_of_B])
        self._num_prompt_keys_B1 = on_device(rows.num_prompt_keys_U[rows.prompt_of_B])[:, None]
        self._own_table_BX = on_device(rows.own_table_BX)
        self._num_own_keys_B1 = on_device(rows.num_own_keys_B)[:, None]

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """See `Attention.attend`."""
        cache.k_cache[self._write_block_B, :, self._write_offset_B] = rows.k_RHD
        cache.v_cache[self._write_block_B, :, self._write_offset_B] = rows.v_RHE
        tables = self._prompt_table_BX, self._own_table_BX
        k_BTHD, v_BTHE = (
            torch.cat([_gathered(found, table_BX) for table_BX in tables], dim=1)
            for found in (cache.k_cache, cache.v_cache)
        )
        mask_BT = self._mask(cache.k_cache.shape[2], rows.window)
        scoring, num_key_heads = rows.scoring, rows.k_RHD.shape[1]
        dtype = torch.promote_types(rows.q_RHD.dtype, torch.float32)
        q_BKGD = rows.q_RHD.to(dtype).unflatten(1, (num_key_heads, -1))
        scores_BKGT = torch.einsum("bkgd,btkd->bkgt", q_BKGD, k_BTHD.to(dtype)) * scoring.softmax_scale
        if scoring.softcap is not None:
            scores_BKGT = torch.tanh(scores_BKGT / scoring.softcap) * scoring.softcap
        scores_BKGT.masked_fill_(~mask_BT[:, None, None], float("-inf"))
        if rows.sinks_H is not None:
            sinks_KG1 = rows.sinks_H.to(dtype).view(num_key_heads, -1, 1)
            scores_BKGT = torch.cat([scores_BKGT, sinks_KG1.expand(scores_BKGT.shape[0], -1, -1, 1)], dim=-1)
        probs_BKGT = torch.softmax(scores_BKGT, dim=-1)[..., : mask_BT.shape[1]]
        out_BKGE = torch.einsum("bkgt,btke->bkge", probs_BKGT, v_BTHE.to(dtype))
        return out_BKGE.flatten(1, 2).to(rows.q_RHD.dtype)

    def _mask(self, block_tokens: int, window: int | None) -> Tensor:
        """[B, T] which of the gathered keys a row reads: those behind a table's end are no keys."""
        device = self._own_table_BX.device
        prompt_1P = torch.arange(self._prompt_table_BX.shape[1] * block_tokens, device=device)[None]
        own_1R = torch.arange(self._own_table_BX.shape[1] * block_tokens, device=device)[None]
        in_prompt_BP, is_own_BR = prompt_1P < self._num_prompt_keys_B1, own_1R < self._num_own_keys_B1
        if window is not None:
            row_B1 = self._num_prompt_keys_B1 + self._num_own_keys_B1 - 1
            in_prompt_BP &= row_B1 - prompt_1P < window
            is_own_BR &= row_B1 - (self._num_prompt_keys_B1 + own_1R) < window
        return torch.cat([in_prompt_BP, is_own_BR], dim=1)


def _gathered(cache: Tensor, table_BX: Tensor) -> Tensor:
    """[num_blocks, K, block, D] -> [B, X * block, K, D]."""
    return cache[table_BX].transpose(2, 3).flatten(1, 2)
