"""Attention of prompts, and of responses that enter again, by the trainer's own kernels."""

# Shape letters: R rows of a pass, T keys of one piece, H heads, D head dim, E value head dim.

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.attention.transfer import to_device
from ratoon.layout import PackedLayout, pack_documents
from ratoon.rollout.engines.paged.block_attention import LayerRows
from ratoon.rollout.engines.paged.block_cache import LayerCache
from ratoon.rollout.engines.paged.runner import PrefillPiece


class Prefill:
    """An `Attention` of whole pieces. Each piece's rows read the keys up to them, in the cache or among the rows.

    Rows stand in the order of `pieces`: those without earlier keys come first, and attend in one call.
    """

    def __init__(self, pieces: Sequence[PrefillPiece], block_tokens: int, device: torch.device) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.start > 0)
        cells = [_cells(piece, block_tokens) for piece in self.pieces]
        sizes = [piece.token_ids.size for piece in self.pieces]
        self._write_block_R, self._write_offset_R = (
            to_device(np.concatenate([cell_T[-size:] for cell_T, size in zip(found, sizes, strict=True)]), device)
            for found in zip(*cells, strict=True)
        )
        self._last_rows = {
            id(piece): end - 1 for piece, end in zip(self.pieces, np.cumsum(sizes).tolist(), strict=True)
        }
        num_whole = sum(piece.start == 0 for piece in self.pieces)
        self._num_whole_rows = sum(sizes[:num_whole])
        self._whole = _Plans([piece.token_ids for piece in self.pieces[:num_whole]], 0, device)
        self._continued = [
            _Continued(piece, to_device(block_T, device), to_device(offset_T, device))
            for piece, (block_T, offset_T) in zip(self.pieces[num_whole:], cells[num_whole:], strict=True)
        ]

    @property
    def token_ids_R(self) -> NDArray[np.int64]:
        return np.concatenate([piece.token_ids for piece in self.pieces])

    @property
    def positions_R(self) -> NDArray[np.int64]:
        return np.concatenate([np.arange(piece.start, piece.num_keys) for piece in self.pieces])

    def last_row_of(self, piece: PrefillPiece) -> int:
        return self._last_rows[id(piece)]

    def of_pieces(self, pieces: Sequence[PrefillPiece], x_R: Tensor) -> tuple[Tensor, ...]:
        """What each piece's rows have in `x_R` [R, ...], in the order of `pieces`."""
        ends = [self.last_row_of(piece) + 1 for piece in pieces]
        return tuple(x_R[end - piece.token_ids.size : end] for piece, end in zip(pieces, ends, strict=True))

    def write(self, cache: LayerCache, rows: LayerRows) -> None:
        """Puts the pieces' keys and values into their blocks."""
        cache.k_cache[self._write_block_R, :, self._write_offset_R] = rows.k_RHD
        cache.v_cache[self._write_block_R, :, self._write_offset_R] = rows.v_RHE

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """See `Attention.attend`."""
        self.write(cache, rows)
        outs: list[Tensor] = []
        row = self._num_whole_rows
        if row:
            keys = rows.k_RHD[:row], rows.v_RHE[:row]
            outs.append(_attend(rows.q_RHD[:row], *keys, self._whole.of(rows.window), rows))
        for piece in self._continued:
            end = row + piece.plans.num_query_rows
            k_THD, v_THE = (found[piece.block_T, :, piece.offset_T] for found in (cache.k_cache, cache.v_cache))
            outs.append(_attend(rows.q_RHD[row:end], k_THD, v_THE, piece.plans.of(rows.window), rows))
            row = end
        return torch.cat(outs)


class _Plans:
    """The plan of each window, built at the first layer that has it."""

    def __init__(self, documents: Sequence[NDArray[np.int64]], num_past: int, device: torch.device) -> None:
        self._layout: PackedLayout = pack_documents(documents)
        self._first_query_row = num_past
        self._device = device
        self._plans: dict[int | None, AttentionPlan] = {}

    @property
    def num_query_rows(self) -> int:
        return self._layout.num_rows - self._first_query_row

    def of(self, window: int | None) -> AttentionPlan:
        if window not in self._plans:
            self._plans[window] = AttentionPlan.build(
                self._layout, self._device, window, first_query_row=self._first_query_row
            )
        return self._plans[window]


class _Continued:
    """A piece with keys in the cache."""

    def __init__(self, piece: PrefillPiece, block_T: Tensor, offset_T: Tensor) -> None:
        self.block_T = block_T
        self.offset_T = offset_T
        # Attention reads no token ids.
        self.plans = _Plans([np.zeros(piece.num_keys, np.int64)], piece.start, block_T.device)


def _attend(q_RHD: Tensor, k_THD: Tensor, v_THE: Tensor, plan: AttentionPlan, rows: LayerRows) -> Tensor:
    scoring = rows.scoring
    return forest_attention(
        q_RHD, k_THD, v_THE, plan, softmax_scale=scoring.softmax_scale, softcap=scoring.softcap, sinks_H=rows.sinks_H
    )


def _cells(piece: PrefillPiece, block_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block and offset of each of the piece's keys: [T] each."""
    prompt_index, own_index = np.arange(piece.num_prompt_keys), np.arange(piece.num_own_keys)
    block_T = np.concatenate(
        [
            np.asarray(piece.prompt_blocks, np.int64)[prompt_index // block_tokens],
            np.asarray(piece.own_blocks, np.int64)[own_index // block_tokens],
        ]
    )
    return block_T, np.concatenate([prompt_index, own_index]) % block_tokens
