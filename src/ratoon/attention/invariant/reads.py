"""Which keys each tile of rows reads: its ancestors' and its own, in tables of blocks."""

# Shape letters: S segments, R tiles of rows, A ancestors of all tiles, F blocks of all tables.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.transfer import to_device

BLOCK_TOKENS = 64
"""Keys of one block, in caches and in packed rows alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileReads:
    """int32, on the device. A segment's key i is in block `blocks[table + i // BLOCK_TOKENS]`."""

    rows_R: Tensor
    """Row of the queries that is the tile's first."""

    counts_R: Tensor
    """Rows of the tile."""

    ends_R: Tensor
    """Own keys up to the tile's last row, its own included; 0: padding, which reads nothing."""

    own_table_R: Tensor

    own_position_R: Tensor
    """Logical position of the first own key."""

    ancestor_offsets_R: Tensor
    """[R + 1]. Tile r's ancestors, from the root on, are [offsets[r], offsets[r + 1])."""

    ancestor_table_A: Tensor

    ancestor_length_A: Tensor
    """Keys of the ancestor. All are read, as far as the window goes."""

    ancestor_position_A: Tensor

    blocks_F: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows of one segment that come after one another, and the segments before it."""

    first_row: int
    start: int
    end: int
    """Of the segment's tokens, those that are [start, end)."""

    segment: int
    ancestors: tuple[int, ...] = ()
    """From the root on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Keys of one segment."""

    length: int
    position: int
    blocks: NDArray[np.int32]


def tiles_of_plan(plan: AttentionPlan, tile_tokens: int) -> TileReads:
    """Of all rows of a packed layout, whose blocks are rows: block number i begins at row i."""
    layout = plan.layout
    offsets: list[int] = layout.segment_offsets.tolist()
    parents: list[int] = layout.segment_parent.tolist()
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = []
    spans: list[Span] = []
    for index, parent in enumerate(parents):
        start, end = offsets[index], offsets[index + 1]
        before = (*paths[parent], parent) if parent >= 0 else ()
        position = int(layout.positions_T[start])
        blocks = np.arange(start, end, BLOCK_TOKENS, dtype=np.int32)
        segments.append(Segment(length=end - start, position=position, blocks=blocks))
        paths.append(before)
        spans.append(Span(first_row=start, start=0, end=end - start, segment=index, ancestors=before))
    return build_tiles(spans, segments, tile_tokens, plan.device)


def build_tiles(
    spans: Sequence[Span], segments: Sequence[Segment], tile_tokens: int, device: torch.device
) -> TileReads:
    """Tiles of `tile_tokens` rows that start at multiples of it in their segment; a span may begin and end within."""
    table_S = np.cumsum([0, *(segment.blocks.size for segment in segments)])
    length_S = np.array([segment.length for segment in segments], np.int32)
    position_S = np.array([segment.position for segment in segments], np.int32)
    rows, counts, ends, owners, num_ancestors, ancestors = ([np.zeros(0, np.int64)] for _ in range(6))
    for span in spans:
        cuts = np.arange(span.start // tile_tokens + 1, -(-span.end // tile_tokens)) * tile_tokens
        bounds = np.concatenate([[span.start], cuts, [span.end]])
        rows.append(span.first_row + bounds[:-1] - span.start)
        counts.append(np.diff(bounds))
        ends.append(bounds[1:])
        owners.append(np.full(bounds.size - 1, span.segment))
        num_ancestors.append(np.full(bounds.size - 1, len(span.ancestors)))
        ancestors.append(np.tile(np.array(span.ancestors, np.int64), bounds.size - 1))
    owner_R, ancestor_A = np.concatenate(owners), np.concatenate(ancestors)

    def on_device(*arrays: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return to_device(np.concatenate(arrays), device, torch.int32)

    return TileReads(
        rows_R=on_device(*rows),
        counts_R=on_device(*counts),
        ends_R=on_device(*ends),
        own_table_R=on_device(table_S[owner_R]),
        own_position_R=on_device(position_S[owner_R]),
        ancestor_offsets_R=on_device(np.zeros(1, np.int64), np.cumsum(np.concatenate(num_ancestors))),
        ancestor_table_A=on_device(table_S[ancestor_A]),
        ancestor_length_A=on_device(length_S[ancestor_A]),
        ancestor_position_A=on_device(position_S[ancestor_A]),
        blocks_F=on_device(np.zeros(0, np.int32), *(segment.blocks for segment in segments)),
    )
