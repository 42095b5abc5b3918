"""In which order rows visit an item of the adding kernel: what programs that run together read, and where they add.

Rows that read keys have their end in common. Programs that visit them from there, close behind one another, read each
tile out of L2; the same tile at the same time would have them wait for each other's additions to it.
"""

# Shape letters: I items, J intervals, P programs (an item of one key head each), B runs of tiles.

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import Intervals
from ratoon.attention.triton.schedule import (
    DeviceIntervals,
    KeyItems,
    KeySchedule,
    key_schedule,
    lengths,
    offsets,
    on_device,
    share_out,
    starts,
)

CROWD = 48
"""Items of a segment that are too many for one tile. Fewer of them start at different times anyway."""


class Walk(StrEnum):
    FROM_START = "from start"
    """Head after head, from each item's own first row on."""

    FROM_END = "from end"
    """From the last row down, every head of a tile before the next tile. So do the walks below."""

    STAGGERED = "staggered"
    """Items of a crowd start one head of a tile apart, and visit at last what they left out."""

    JOINING = "joining"
    """Staggered, but from where the crowd is by then: a program that starts late joins those that run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyWalks:
    """Items, and each program's rows in the order in which they visit it."""

    items: KeySchedule

    full: DeviceIntervals
    partial: DeviceIntervals
    """Tiles of rows, listed by program, one interval after the other; from the end, each from its last tile down."""

    turn_P: Tensor
    """[P] int32, the head of the group that comes first in each tile, from the end."""


def build_key_walks(
    plan: AttentionPlan, row_tile: int, key_tile: int, num_workers: int, num_kv_heads: int, group_size: int, walk: Walk
) -> KeyWalks:
    """group_size: query heads of a key head. All else is of `build_key_schedule`."""
    items = share_out(plan, row_tile, key_tile, num_workers, num_kv_heads)
    lengths_I, item_P = lengths(items.full), items.work_P // num_kv_heads
    shift_P, turn_P = where_to_start(items, lengths_I, num_workers, num_kv_heads, group_size, walk)
    is_from_end = walk is not Walk.FROM_START
    return KeyWalks(
        items=key_schedule(items, plan),
        full=_list_by_program(items.full, item_P, lengths_I[item_P] - shift_P, is_from_end, plan),
        partial=_list_by_program(items.partial, item_P, lengths(items.partial)[item_P], is_from_end, plan),
        turn_P=on_device(turn_P, plan),
    )


def where_to_start(
    items: KeyItems, lengths_I: NDArray[np.int32], num_workers: int, num_kv_heads: int, group_size: int, walk: Walk
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """([P] full tiles from the end that come last instead of first, less than `lengths_I`; [P] the first head)."""
    item_P, head_P = np.divmod(items.work_P, num_kv_heads)
    num_items_S = np.bincount(items.segment_I)
    first_item_S = np.cumsum(num_items_S) - num_items_S  # items are listed by segment
    rank_P = item_P - first_item_S[items.segment_I[item_P]]
    is_crowded_P = (num_items_S[items.segment_I[item_P]] >= CROWD) & (lengths_I[item_P] > 0)
    if walk in (Walk.FROM_START, Walk.FROM_END):
        is_crowded_P[:] = False
    # As many places as can be taken at once.
    shift_P, turn_P = np.divmod(np.where(is_crowded_P, rank_P % num_workers, 0), group_size)
    if walk is Walk.JOINING:
        crowd_P = items.segment_I[item_P] * num_kv_heads + head_P
        programs = np.flatnonzero(is_crowded_P)
        start_times = starts(items.costs_I[item_P], num_workers)[programs]
        shift_P[programs] += _behind_the_first(start_times, crowd_P[programs], lengths_I[item_P[programs]])
    shift_P = np.where(is_crowded_P, shift_P % np.maximum(lengths_I[item_P], 1), 0)
    return shift_P, turn_P


def _behind_the_first(
    starts: NDArray[np.float64], crowds: NDArray[np.intp], num_tiles: NDArray[np.int32]
) -> NDArray[np.intp]:
    """Tiles that a crowd's first program has visited when each of the others starts.

    Who starts when the crowd has come below all rows that read its own keys, is the first of a new one.
    """
    first_start: dict[int, float] = {}
    tiles = np.zeros(starts.size, np.intp)
    for index, (start, crowd, length) in enumerate(
        zip(starts.tolist(), crowds.tolist(), num_tiles.tolist(), strict=True)
    ):
        behind = int(start - first_start.setdefault(crowd, start))
        if behind >= length:
            first_start[crowd], behind = start, 0
        tiles[index] = behind
    return tiles


def _list_by_program(
    intervals: Intervals,
    item_P: NDArray[np.int32],
    first_P: NDArray[np.integer[Any]],
    is_from_end: bool,
    plan: AttentionPlan,
) -> DeviceIntervals:
    """first_P: an item's tiles before this one come first, then the others; from the end, both last tile first."""
    first_tile_J = offsets(intervals.end_I - intervals.start_I)  # tiles are counted through all lists
    first_tile_I = first_tile_J[intervals.offsets_B]
    begin_P, end_P = first_tile_I[item_P], first_tile_I[item_P + 1]
    middle_P = begin_P + first_P
    from_B, to_B = (np.stack(bounds, 1).ravel() for bounds in ((begin_P, middle_P), (middle_P, end_P)))
    first_J = np.searchsorted(first_tile_J, from_B, side="right") - 1
    counts_B = np.where(from_B < to_B, np.searchsorted(first_tile_J, to_B, side="left") - first_J, 0)
    offsets_B = offsets(counts_B)
    run = np.repeat(np.arange(counts_B.size), counts_B)
    index = np.arange(run.size) - offsets_B[run]
    interval = first_J[run] + (counts_B[run] - 1 - index if is_from_end else index)
    to_row_tile = intervals.start_I[interval] - first_tile_J[interval]
    start = np.maximum(first_tile_J[interval], from_B[run]) + to_row_tile
    end = np.minimum(first_tile_J[interval + 1], to_B[run]) + to_row_tile
    return DeviceIntervals(*(on_device(values, plan) for values in (offsets_B[::2], start, end)))
