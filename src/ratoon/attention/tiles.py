"""Which tiles of keys each tile of rows reads: what every fused kernel's schedule is made of."""

# Shape letters: T rows, R tiles of rows, K tiles of keys, B one side's tiles, I intervals.

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ratoon.layout import PackedLayout


class TileState(IntEnum):
    """What the rows of one tile read of the keys of another."""

    UNREAD = 0
    PARTIAL = 1
    """Some rows read some keys: the kernel must ask the rule of every pair."""
    FULL = 2
    """Every row reads every key, and both tiles are whole: nothing is left to ask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileMap:
    """The forest's mask, a tile at a time. Tiles start at multiples of their size; the last may be short."""

    row_tile: int
    key_tile: int

    state_RK: NDArray[np.uint8]
    """[R, K] `TileState`. A partial tile may turn out unread where it lies across segments; a full one is full."""

    def key_intervals_of_rows(self, state: TileState) -> "Intervals":
        """For each tile of rows, the tiles of keys in that state."""
        return _intervals(self.state_RK == state)

    def row_intervals_of_keys(self, state: TileState) -> "Intervals":
        """For each tile of keys, the tiles of rows in that state."""
        return _intervals((self.state_RK == state).T)


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Half-open intervals of tile numbers, a list for each tile of the other side."""

    offsets_B: NDArray[np.int32]
    """[B + 1]. Tile b owns intervals [offsets[b], offsets[b + 1])."""

    start_I: NDArray[np.int32]
    end_I: NDArray[np.int32]


def build_tile_map(
    layout: PackedLayout, window: int | None, *, row_tile: int, key_tile: int, first_query_row: int = 0
) -> TileMap:
    """From the least and the largest row, expiry and position of each tile: no pair of rows is looked at.

    first_query_row: tiles of rows that end before it read their own keys only; nobody wants their output.

    Takes time and memory in proportion to the number of tile pairs.
    """
    rows_T = np.arange(layout.num_rows, dtype=np.int32)
    # [R, 1] against [1, K].
    first_row, last_row = (extremum[:, None] for extremum in _extrema(rows_T, row_tile))
    first_key, last_key = (extremum[None] for extremum in _extrema(rows_T, key_tile))
    first_expiry, last_expiry = (extremum[None] for extremum in _extrema(layout.expiry_T, key_tile))
    is_read = (first_key <= last_row) & (np.maximum(first_row, first_key) < last_expiry)
    is_whole = (last_row - first_row == row_tile - 1) & (last_key - first_key == key_tile - 1)
    is_full = is_whole & (last_key <= first_row) & (last_row < first_expiry)
    if window is not None:
        lowest_query, highest_query = (extremum[:, None] for extremum in _extrema(layout.positions_T, row_tile))
        lowest_key, highest_key = (extremum[None] for extremum in _extrema(layout.positions_T, key_tile))
        is_read &= lowest_query - highest_key < window
        is_full &= highest_query - lowest_key < window
    # Of rows without queries the tiles on the diagonal are left, for no kernel has been shown a row that reads nothing.
    is_read &= (last_row >= first_query_row) | (last_key >= first_row)
    state_RK = np.full(is_read.shape, TileState.UNREAD, np.uint8)
    state_RK[is_read] = TileState.PARTIAL
    state_RK[is_full & is_read] = TileState.FULL
    return TileMap(row_tile=row_tile, key_tile=key_tile, state_RK=state_RK)


def _extrema(values_T: NDArray[np.int32], tile: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[B] least and [B] largest value of each tile."""
    starts = np.arange(0, values_T.size, tile)
    if not starts.size:
        return values_T, values_T
    return np.minimum.reduceat(values_T, starts), np.maximum.reduceat(values_T, starts)


def _intervals(is_in: NDArray[np.bool_]) -> Intervals:
    """Runs of True along the second axis."""
    num_lists, num_tiles = is_in.shape
    edges = np.zeros((num_lists, num_tiles + 2), np.int8)
    edges[:, 1:-1] = is_in
    steps = np.diff(edges, axis=1)
    lists, starts = np.nonzero(steps == 1)
    _, ends = np.nonzero(steps == -1)
    offsets_B = np.searchsorted(lists, np.arange(num_lists + 1)).astype(np.int32)
    return Intervals(offsets_B, starts.astype(np.int32), ends.astype(np.int32))
