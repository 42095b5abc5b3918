"""What each program of the kernels does, in which order: the tile map as device tables.

A program takes the next piece of work when a multiprocessor is free. Tiles of rows are listed by falling cost: the
last ones to start are the shortest. Items of keys that read the same rows run side by side, as far as that leaves
nobody waiting at the end: what they read comes out of memory once.
"""

# Shape letters: R tiles of rows, K tiles of keys, I items, J intervals, X split tiles, P programs (an item of one
# key head each), B lists.

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import Intervals, TileState, build_tile_map
from ratoon.attention.transfer import to_device

PARTIAL_COST = 1.4
"""Time of a partial tile in full ones, the mask's comparisons, as far as the order of work is concerned."""

START_COST = 1.5
"""Time in full tiles of what a tile of rows takes besides its keys: its own rows in, its output out."""

MIXED_ITEMS = 4
"""Where heads are mixed at the end: each worker's share of the mixed ones, in the costliest tile's time."""

MAX_SHARE = 1.0
"""An item takes at most this part of what each multiprocessor has to do for keys. Work for rows fills the gaps."""

MAX_WAIT = 0.015
"""Side by side, items may take this much longer than by falling cost."""

LATENESS = (1.0, 0.5, 0.25, 0.125, 0.0)
"""How late an item may end, in the costliest item's time: what is tried in turn. 1: as late as it likes."""

NUM_COST_CLASSES = 64
"""Items of a class count as of one cost where one has to start before another."""


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

    costs_R: NDArray[np.float64]
    """In full tiles of keys, on the host."""

    full: DeviceIntervals
    partial: DeviceIntervals
    """Tiles of keys, listed by number of the row tile."""

    key_terms: Tensor
    """[2, tiles * key_tile] int32 of each key: how many rows from its own on may read it, and its position.

    Keys behind the last one are read by no row.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowWork:
    """Every head of every tile of rows, shared out to programs that each do several, one after the other."""

    work_P: Tensor
    """[P] int32, query head * R + tile of rows."""

    offsets_W: Tensor
    """[programs + 1] int32. Program w does work [offsets[w], offsets[w + 1])."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySchedule:
    """Items: a tile of keys with rows that read it. A tile read by very many rows is split into several items."""

    tile_I: Tensor
    """[I] int32 tile of keys, ascending."""

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

    work_P: Tensor
    """[P] int32, item * num_kv_heads + key head of each program, in the order in which they start."""


def build_row_schedule(plan: AttentionPlan, row_tile: int, key_tile: int) -> RowSchedule:
    tiles = build_tile_map(
        plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile, first_query_row=plan.first_query_row
    )
    full = tiles.key_intervals_of_rows(TileState.FULL)
    partial = tiles.key_intervals_of_rows(TileState.PARTIAL)
    costs_R = _lengths(full) + PARTIAL_COST * _lengths(partial)
    return RowSchedule(
        tile_R=_on_device(_by_falling(costs_R), plan),
        costs_R=costs_R,
        full=_intervals_on_device(full, plan),
        partial=_intervals_on_device(partial, plan),
        key_terms=_on_device(_key_terms(plan, key_tile), plan),
    )


def build_row_work(plan: AttentionPlan, row_tile: int, key_tile: int, num_heads: int, num_workers: int) -> RowWork:
    """Each worker's program gets what it is expected to be free for.

    Head after head, each head's tiles by falling cost; the last heads' tiles all by falling cost, so that no worker
    ends long after the others.
    """
    costs_R = plan.schedule(build_row_schedule, row_tile, key_tile).costs_R + START_COST
    num_mixed = math.ceil(MIXED_ITEMS * num_workers * costs_R.max(initial=0.0) / max(costs_R.sum(), 1.0))
    num_mixed = min(num_mixed, num_heads)
    heads = np.arange(num_heads, dtype=np.int32)[:, None] * costs_R.size
    work_HR = heads + _by_falling(costs_R)
    work_P = np.concatenate([work_HR[: num_heads - num_mixed].ravel(), work_HR[num_heads - num_mixed :].T.ravel()])
    worker_P = _first_free(costs_R[work_P % max(costs_R.size, 1)], num_workers)
    return RowWork(
        work_P=_on_device(work_P[np.argsort(worker_P, kind="stable")], plan),
        offsets_W=_on_device(_offsets(np.bincount(worker_P, minlength=num_workers)), plan),
    )


def build_key_schedule(
    plan: AttentionPlan, row_tile: int, key_tile: int, num_workers: int, num_kv_heads: int = 1
) -> KeySchedule:
    """num_workers: multiprocessors that all key heads' items are shared out to, at least 1."""
    tiles = build_tile_map(
        plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile, first_query_row=plan.first_query_row
    )
    full = tiles.row_intervals_of_keys(TileState.FULL)
    partial = tiles.row_intervals_of_keys(TileState.PARTIAL)
    costs_K = _lengths(full) + PARTIAL_COST * _lengths(partial)
    max_cost = max(MAX_SHARE * costs_K.sum() / max(num_workers // num_kv_heads, 1), 1.0)
    parts_K = np.maximum(np.ceil(costs_K / max_cost), 1).astype(np.int32)
    # No more parts than tiles of rows: none would be left for some.
    parts_K = np.minimum(parts_K, np.maximum(_lengths(full) + _lengths(partial), 1)).astype(np.int32)
    tile_I = np.repeat(np.arange(parts_K.size, dtype=np.int32), parts_K)
    full, partial = _split(full, parts_K), _split(partial, parts_K)
    costs_I = _lengths(full) + PARTIAL_COST * _lengths(partial)

    split_tile_X = np.flatnonzero(parts_K > 1).astype(np.int32)
    is_split_I = parts_K[tile_I] > 1
    slot_I = np.where(is_split_I, np.cumsum(is_split_I) - 1, -1).astype(np.int32)
    # Keys of one segment are read by the same rows, but for the tiles on the diagonal.
    segment_I = np.searchsorted(plan.layout.segment_offsets, tile_I * key_tile, side="right") - 1
    return KeySchedule(
        tile_I=_on_device(tile_I, plan),
        slot_I=_on_device(slot_I, plan),
        full=_intervals_on_device(full, plan),
        partial=_intervals_on_device(partial, plan),
        split_tile_X=_on_device(split_tile_X, plan),
        split_slots=_on_device(_offsets(parts_K[split_tile_X]), plan),
        num_slots=int(is_split_I.sum()),
        work_P=_on_device(order_programs(costs_I, segment_I, num_workers, num_kv_heads), plan),
    )


def order_programs(
    costs_I: NDArray[np.float64], group_I: NDArray[np.intp], num_workers: int, num_kv_heads: int
) -> NDArray[np.int32]:
    """[P] item * num_kv_heads + head: neighbours read the same rows, and all workers end at nearly the same time.

    Groups are of items that read the same rows, the group of the costliest item first; in a group head after head, a
    head's items by falling cost. Where the last item would end too late, items that take long start earlier.
    """
    costs_P = np.repeat(costs_I, num_kv_heads)
    falling_P = _by_falling(costs_P)
    best = max(costs_P.sum() / num_workers, costs_P.max(initial=0.0))
    limit = 0.0
    for order_P in _orders(costs_P, falling_P, np.repeat(group_I, num_kv_heads), num_workers, num_kv_heads):
        makespan = _makespan(costs_P[order_P], num_workers)
        if makespan <= (1 + MAX_WAIT) * best:
            return order_P
        limit = limit or (1 + MAX_WAIT) * _makespan(costs_P[falling_P], num_workers)
        if makespan <= limit:
            return order_P
    return falling_P


def _orders(
    costs_P: NDArray[np.float64],
    falling_P: NDArray[np.int32],
    group_P: NDArray[np.intp],
    num_workers: int,
    num_kv_heads: int,
) -> Iterator[NDArray[np.int32]]:
    """From the one that reads least to the one that ends soonest."""
    wanted_P = _by_falling_in_groups(costs_P, group_P, np.arange(costs_P.size) % num_kv_heads)
    yield wanted_P
    for lateness in LATENESS[1:]:
        yield _start_in_time(costs_P, falling_P, wanted_P, num_workers, lateness)


def _start_in_time(
    costs_P: NDArray[np.float64],
    falling_P: NDArray[np.int32],
    wanted_P: NDArray[np.int32],
    num_workers: int,
    lateness: float,
) -> NDArray[np.int32]:
    """The wanted order, but for programs that would end more than `lateness` costliest programs after the mean.

    While a program waits every worker is busy, so it starts once the cost before it is shared out, at the latest.
    Made from the end: the last program is the last wanted one of those that are short enough to start then. No
    program comes after where it is by falling cost, if that is too late already.
    """
    costs = costs_P[falling_P]
    end = costs.sum() / num_workers + lateness * costs.max(initial=0.0)
    # What all programs up to this one may cost.
    latest = np.maximum(np.cumsum(costs), end * num_workers - costs * (num_workers - 1))
    classes = np.floor(costs * (NUM_COST_CLASSES / max(costs.max(initial=0.0), 1.0)))
    bounds = np.flatnonzero(np.diff(classes, prepend=-1.0, append=-1.0))
    place_P = np.empty_like(wanted_P)
    place_P[wanted_P] = np.arange(wanted_P.size)
    wanted_costs = costs_P[wanted_P]
    may_be_last = np.zeros(wanted_P.size, np.bool_)
    cost_left, taken = costs.sum(), [wanted_P[:0]]
    for index in range(bounds.size - 2, -1, -1):
        may_be_last[place_P[falling_P[bounds[index] : bounds[index + 1]]]] = True
        places = np.flatnonzero(may_be_last)[::-1]
        if index > 0:  # until the next class may be last
            before = np.cumsum(wanted_costs[places]) - wanted_costs[places]
            places = places[cost_left - before > latest[bounds[index - 1]]]
        may_be_last[places] = False
        cost_left -= wanted_costs[places].sum()
        taken.append(wanted_P[places])
    return np.concatenate(taken)[::-1].copy()


def _makespan(costs: NDArray[np.float64], num_workers: int) -> float:
    """When the last worker is done, if whoever is free takes the next piece of work."""
    busy_until = [0.0] * num_workers
    for cost in costs.tolist():
        heapq.heapreplace(busy_until, busy_until[0] + cost)
    return max(busy_until)


def _first_free(costs_P: NDArray[np.float64], num_workers: int) -> NDArray[np.intp]:
    """[P] the worker that each goes to, if whoever is free takes the next."""
    busy_until = [(0.0, worker) for worker in range(num_workers)]
    worker_P = np.empty(costs_P.size, np.intp)
    for index, cost in enumerate(costs_P.tolist()):
        time, worker = busy_until[0]
        heapq.heapreplace(busy_until, (time + cost, worker))
        worker_P[index] = worker
    return worker_P


def _key_terms(plan: AttentionPlan, key_tile: int) -> NDArray[np.int32]:
    T = plan.num_rows
    terms = np.zeros((2, -(-T // key_tile) * key_tile), np.int32)
    terms[0, :T] = np.maximum(plan.layout.expiry_T - np.arange(T, dtype=np.int32), 0)
    terms[1, :T] = plan.layout.positions_T
    return terms


def _split(intervals: Intervals, parts_B: NDArray[np.int32]) -> Intervals:
    """Cuts each list's tiles, in order, into `parts_B` lists of nearly equal length (some may be empty)."""
    lengths_B = _lengths(intervals).astype(np.intp)
    list_I = np.repeat(np.arange(parts_B.size), parts_B)
    part_I = np.arange(list_I.size) - np.repeat(_offsets(parts_B)[:-1], parts_B)
    # Tiles are counted through all lists.
    first_B, first_J = _offsets(lengths_B)[:-1], _offsets(intervals.end_I - intervals.start_I)
    first_I = first_B[list_I] + part_I * lengths_B[list_I] // parts_B[list_I]
    cuts = np.union1d(first_I, first_J)
    cut_from, cut_to = cuts[:-1], cuts[1:]
    # Of parts that start at one tile all but the last are empty.
    item = np.searchsorted(first_I, cut_from, side="right") - 1
    interval = np.searchsorted(first_J, cut_from, side="right") - 1
    offset = intervals.start_I[interval] - first_J[interval]
    counts_I = np.bincount(item, minlength=list_I.size)
    return Intervals(_offsets(counts_I), (cut_from + offset).astype(np.int32), (cut_to + offset).astype(np.int32))


def _lengths(intervals: Intervals) -> NDArray[np.int32]:
    """[B] number of tiles in each list."""
    total = _offsets(intervals.end_I - intervals.start_I)
    return total[intervals.offsets_B[1:]] - total[intervals.offsets_B[:-1]]


def _offsets(counts: NDArray[np.int32] | NDArray[np.intp]) -> NDArray[np.int32]:
    offsets = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _by_falling(costs: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.argsort(-costs, kind="stable").astype(np.int32)


def _by_falling_in_groups(
    costs: NDArray[np.float64], groups: NDArray[np.intp], heads: NDArray[np.intp]
) -> NDArray[np.int32]:
    """Groups one after the other, the one with the highest cost first; in a group head by head, by falling cost."""
    highest = np.zeros(groups.max(initial=-1) + 1)
    np.maximum.at(highest, groups, costs)
    return np.lexsort((-costs, heads, groups, -highest[groups])).astype(np.int32)


def _intervals_on_device(intervals: Intervals, plan: AttentionPlan) -> DeviceIntervals:
    return DeviceIntervals(
        _on_device(intervals.offsets_B, plan), _on_device(intervals.start_I, plan), _on_device(intervals.end_I, plan)
    )


def _on_device(values: NDArray[np.integer[Any]], plan: AttentionPlan) -> Tensor:
    return to_device(values, plan.device, torch.int32)
