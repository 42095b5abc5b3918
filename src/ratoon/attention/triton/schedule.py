"""What each program of the kernels does, in which order: the tile map as device tables.

A program takes the next piece of work when a multiprocessor is free, so pieces are listed by falling
cost: the last ones to start are the shortest.
"""

# Shape letters: R tiles of rows, K tiles of keys, I items, J intervals, X split tiles.

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import Intervals, TileState, build_tile_map

PARTIAL_COST = 1.4
"""Time of a partial tile in full ones: the mask's loads and comparisons."""

MAX_SHARE = 1.0
"""An item takes at most this part of what each multiprocessor has to do for keys. Work for rows fills the gaps."""


class DeviceIntervals(NamedTuple):
    """`Intervals` on the device, int32."""

    offsets: Tensor
    start_J: Tensor
    end_J: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSchedule:
    """For each tile of rows, the tiles of keys it reads."""

    tile_R: Tensor
    """[R] int32 tiles of rows, the most expensive first."""

    full: DeviceIntervals
    partial: DeviceIntervals
    """Tiles of keys, listed by number of the row tile."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySchedule:
    """Items: a tile of keys with rows that read it. A tile read by very many rows is split into several items."""

    tile_I: Tensor
    """[I] int32 tile of keys, the most expensive item first."""

    slot_I: Tensor
    """[I] int32 place of the item's part in the workspace, -1 for an item that is a whole tile."""

    full: DeviceIntervals
    partial: DeviceIntervals
    """Tiles of rows, listed by number of the item."""

    split_tile_X: Tensor
    """[X] int32 tiles of keys that were split."""

    split_slots: Tensor
    """[X + 1] int32. Slots [slots[x], slots[x + 1]) hold the parts of split tile x."""

    num_slots: int


def build_row_schedule(plan: AttentionPlan, row_tile: int, key_tile: int) -> RowSchedule:
    tiles = build_tile_map(plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile)
    full = tiles.key_intervals_of_rows(TileState.FULL)
    partial = tiles.key_intervals_of_rows(TileState.PARTIAL)
    costs_R = _lengths(full) + PARTIAL_COST * _lengths(partial)
    return RowSchedule(
        tile_R=_on_device(_by_falling(costs_R), plan),
        full=_intervals_on_device(full, plan),
        partial=_intervals_on_device(partial, plan),
    )


def build_key_schedule(plan: AttentionPlan, row_tile: int, key_tile: int, num_workers: int) -> KeySchedule:
    """num_workers: multiprocessors that each key head's items are shared out to, at least 1."""
    tiles = build_tile_map(plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile)
    full = tiles.row_intervals_of_keys(TileState.FULL)
    partial = tiles.row_intervals_of_keys(TileState.PARTIAL)
    costs_K = _lengths(full) + PARTIAL_COST * _lengths(partial)
    max_cost = max(MAX_SHARE * costs_K.sum() / num_workers, 1.0)
    parts_K = np.maximum(np.ceil(costs_K / max_cost), 1).astype(np.int32)
    # No more parts than tiles of rows: none would be left for some.
    parts_K = np.minimum(parts_K, np.maximum(_lengths(full) + _lengths(partial), 1)).astype(np.int32)
    item_tile_I = np.repeat(np.arange(parts_K.size, dtype=np.int32), parts_K)
    full, partial = _split(full, parts_K), _split(partial, parts_K)
    costs_I = _lengths(full) + PARTIAL_COST * _lengths(partial)

    split_tile_X = np.flatnonzero(parts_K > 1).astype(np.int32)
    is_split_I = parts_K[item_tile_I] > 1
    slot_I = np.where(is_split_I, np.cumsum(is_split_I) - 1, -1).astype(np.int32)
    order_I = _by_falling(costs_I)
    return KeySchedule(
        tile_I=_on_device(item_tile_I[order_I], plan),
        slot_I=_on_device(slot_I[order_I], plan),
        full=_intervals_on_device(_reorder(full, order_I), plan),
        partial=_intervals_on_device(_reorder(partial, order_I), plan),
        split_tile_X=_on_device(split_tile_X, plan),
        split_slots=_on_device(_offsets(parts_K[split_tile_X]), plan),
        num_slots=int(is_split_I.sum()),
    )


def _split(intervals: Intervals, parts_B: NDArray[np.int32]) -> Intervals:
    """Cuts each list's tiles, in order, into `parts_B` lists of nearly equal length (some may be empty)."""
    starts: list[int] = []
    ends: list[int] = []
    counts: list[int] = []
    for tile, parts in enumerate(parts_B.tolist()):
        first, stop = int(intervals.offsets_B[tile]), int(intervals.offsets_B[tile + 1])
        spans = list(zip(intervals.start_I[first:stop].tolist(), intervals.end_I[first:stop].tolist(), strict=True))
        total = sum(end - start for start, end in spans)
        for part in range(parts):
            low, high = part * total // parts, (part + 1) * total // parts
            before, count = 0, 0
            for start, end in spans:
                cut_start, cut_end = max(start, start + low - before), min(end, start + high - before)
                if cut_start < cut_end:
                    starts.append(cut_start)
                    ends.append(cut_end)
                    count += 1
                before += end - start
            counts.append(count)
    return Intervals(_offsets(np.asarray(counts, np.int32)), np.asarray(starts, np.int32), np.asarray(ends, np.int32))


def _reorder(intervals: Intervals, order_B: NDArray[np.int32]) -> Intervals:
    """The lists in another order."""
    counts_B = np.diff(intervals.offsets_B)[order_B]
    offsets_B = _offsets(counts_B)
    within = np.arange(offsets_B[-1]) - np.repeat(offsets_B[:-1], counts_B)
    index_I = np.repeat(intervals.offsets_B[:-1][order_B], counts_B) + within
    return Intervals(offsets_B, intervals.start_I[index_I], intervals.end_I[index_I])


def _lengths(intervals: Intervals) -> NDArray[np.int32]:
    """[B] number of tiles in each list."""
    total = _offsets(intervals.end_I - intervals.start_I)
    return total[intervals.offsets_B[1:]] - total[intervals.offsets_B[:-1]]


def _offsets(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    offsets = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _by_falling(costs: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.argsort(-costs, kind="stable").astype(np.int32)


def _intervals_on_device(intervals: Intervals, plan: AttentionPlan) -> DeviceIntervals:
    return DeviceIntervals(
        _on_device(intervals.offsets_B, plan), _on_device(intervals.start_I, plan), _on_device(intervals.end_I, plan)
    )


def _on_device(values: NDArray[np.int32], plan: AttentionPlan) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=plan.device)
