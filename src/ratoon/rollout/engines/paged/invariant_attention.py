"""Attention of a batch-invariant model over the cache: the trainer's own walk, for prompts and for decoding alike."""

# Shape letters: R rows of a pass, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ratoon.attention.invariant.attention import attend_tiles, tile_sizes
from ratoon.attention.invariant.reads import BLOCK_TOKENS, Segment, Span, TileReads, build_tiles
from ratoon.attention.paged.decode import DeviceReads, write_keys
from ratoon.rollout.engines.paged.block_attention import LayerRows
from ratoon.rollout.engines.paged.block_cache import LayerCache
from ratoon.rollout.engines.paged.prefill import Prefill
from ratoon.rollout.engines.paged.runner import PrefillPiece


class InvariantDecode:
    """An `Attention` of one row for each response: its prompt's keys and then its own, in a tile for each."""

    def __init__(self, reads: DeviceReads) -> None:
        _check_blocks(reads.block_tokens)
        self._reads = reads
        num_rows, device = reads.room.rows, reads.blocks.device
        self._counts_R = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._ones_R = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._zeros_R = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """See `Attention.attend`."""
        reads, size = self._reads, rows.q_RHD.shape[0]
        k_RHD, v_RHE = (x if x.stride(-1) == 1 else x.contiguous() for x in (rows.k_RHD, rows.v_RHE))
        write_keys(k_RHD, v_RHE, cache.k_cache, cache.v_cache, reads)
        tiles = TileReads(
            rows_R=self._counts_R[:size],
            counts_R=self._ones_R[:size],
            ends_R=reads.own_lengths[:size],
            own_table_R=reads.own_table[:size],
            own_position_R=reads.first_position[:size],
            ancestor_offsets_R=self._counts_R[: size + 1],
            ancestor_table_A=reads.prompt_table[:size],
            ancestor_length_A=reads.first_position[:size],  # a prompt begins at position 0
            ancestor_position_A=self._zeros_R[:size],
            blocks_F=reads.blocks,
        )
        return _attend(cache, rows, tiles)


class InvariantPrefill(Prefill):
    """As `Prefill`, but every row walks over the cache, whether its keys are new or not."""

    def __init__(self, pieces: Sequence[PrefillPiece], block_tokens: int, device: torch.device) -> None:
        super().__init__(pieces, block_tokens, device)
        _check_blocks(block_tokens)
        self._device = device
        self._tiles_of: dict[int, TileReads] = {}

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """See `Attention.attend`."""
        self.write(cache, rows)
        tile_tokens = _tile_tokens(rows)
        if tile_tokens not in self._tiles_of:
            self._tiles_of[tile_tokens] = self._tiles(tile_tokens)
        return _attend(cache, rows, self._tiles_of[tile_tokens])

    def _tiles(self, tile_tokens: int) -> TileReads:
        segments: list[Segment] = []
        spans: list[Span] = []
        row = 0
        for piece in self.pieces:
            size, is_own = piece.token_ids.size, piece.num_own_keys > 0
            segments.append(_segment(piece.num_prompt_keys, 0, piece.prompt_blocks))
            if is_own:
                segments.append(_segment(piece.num_own_keys, piece.num_prompt_keys, piece.own_blocks))
            number, end = len(segments) - 1, segments[-1].length
            assert size <= end, "a piece holds tokens of a prompt and of a response"
            spans.append(
                Span(
                    first_row=row,
                    start=end - size,
                    end=end,
                    segment=number,
                    ancestors=(number - 1,) if is_own else (),
                )
            )
            row += size
        return build_tiles(spans, segments, tile_tokens, self._device)


def _segment(length: int, position: int, blocks: Sequence[int]) -> Segment:
    used = np.asarray(blocks, np.int32)[: -(-length // BLOCK_TOKENS)]
    return Segment(length=length, position=position, blocks=used)


def _attend(cache: LayerCache, rows: LayerRows, tiles: TileReads) -> Tensor:
    q_RHD = rows.q_RHD if rows.q_RHD.stride(-1) == 1 else rows.q_RHD.contiguous()
    caches = cache.k_cache, cache.v_cache
    return attend_tiles(q_RHD, *caches, tiles, rows.scoring, window=rows.window, sinks_H=rows.sinks_H)[0]


def _tile_tokens(rows: LayerRows) -> int:
    (_, Hq, D), (_, Hkv, E) = rows.q_RHD.shape, rows.v_RHE.shape
    return tile_sizes(rows.q_RHD, Hq // Hkv, max(D, E)).tokens


def _check_blocks(block_tokens: int) -> None:
    assert block_tokens == BLOCK_TOKENS, f"blocks of {block_tokens} tokens; the trainer's have {BLOCK_TOKENS}"
