"""Every pair of tiles that the map lists is somebody's work, once; programs start in an order that reads little."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.attention.oracle import forests, make_groups

from ratoon.attention import AttentionPlan
from ratoon.attention.tiles import TileState, build_tile_map
from ratoon.attention.triton.schedule import (
    MAX_WAIT,
    PARTIAL_COST,
    DeviceIntervals,
    KeySchedule,
    build_key_schedule,
    build_row_schedule,
    order_programs,
)
from ratoon.layout import PackedLayout, pack_documents

ROW_TILE, KEY_TILE = 2, 3


def listed(intervals: DeviceIntervals, item: int) -> list[int]:
    first, stop = intervals.offsets[item : item + 2].tolist()
    spans = zip(intervals.start_J[first:stop].tolist(), intervals.end_J[first:stop].tolist(), strict=True)
    return [tile for start, end in spans for tile in range(start, end)]


@given(forests, st.sampled_from([None, 3]))
def test_row_tiles_are_all_there_the_most_expensive_first(layout: PackedLayout, window: int | None):
    plan = AttentionPlan.build(layout, window=window)
    schedule = build_row_schedule(plan, ROW_TILE, KEY_TILE)
    state_RK = build_tile_map(layout, plan.window, row_tile=ROW_TILE, key_tile=KEY_TILE).state_RK
    assert sorted(schedule.tile_R.tolist()) == list(range(len(state_RK)))
    costs: list[int] = []
    for tile in schedule.tile_R.tolist():
        full, partial = listed(schedule.full, tile), listed(schedule.partial, tile)
        assert full == np.flatnonzero(state_RK[tile] == TileState.FULL).tolist()
        assert partial == np.flatnonzero(state_RK[tile] == TileState.PARTIAL).tolist()
        costs.append(len(full) + len(partial))
    assert all(costs[i] * 1.4 >= costs[i + 1] for i in range(len(costs) - 1)), "a partial tile counts 1.4"


@given(forests, st.sampled_from([None, 3]), st.integers(1, 40))
def test_items_cover_each_key_tiles_rows_once(layout: PackedLayout, window: int | None, num_workers: int):
    plan = AttentionPlan.build(layout, window=window)
    schedule = build_key_schedule(plan, ROW_TILE, KEY_TILE, num_workers)
    state_RK = build_tile_map(layout, plan.window, row_tile=ROW_TILE, key_tile=KEY_TILE).state_RK
    done = np.zeros_like(state_RK)
    slots: dict[int, list[int]] = {}
    for item, (tile, slot) in enumerate(zip(schedule.tile_I.tolist(), schedule.slot_I.tolist(), strict=True)):
        for intervals, state in ((schedule.full, TileState.FULL), (schedule.partial, TileState.PARTIAL)):
            for row_tile in listed(intervals, item):
                assert done[row_tile, tile] == TileState.UNREAD, "two items share a pair"
                done[row_tile, tile] = state
        slots.setdefault(tile, []).append(slot)
    np.testing.assert_array_equal(done, state_RK)
    assert sorted(slots) == list(range(state_RK.shape[1])), "a tile of keys that nobody writes"

    # The parts that are added up are those that were written.
    whole = {tile for tile, of_tile in slots.items() if of_tile == [-1]}
    split = schedule.split_tile_X.tolist()
    assert whole.isdisjoint(split) and len(whole) + len(split) == len(slots)
    bounds = schedule.split_slots.tolist()
    assert bounds[-1] == schedule.num_slots
    for x, tile in enumerate(split):
        assert sorted(slots[tile]) == list(range(bounds[x], bounds[x + 1]))


def costs_of(schedule: KeySchedule) -> list[float]:
    return [
        len(listed(schedule.full, item)) + PARTIAL_COST * len(listed(schedule.partial, item))
        for item in range(len(schedule.tile_I))
    ]


@pytest.mark.parametrize("num_workers", [2, 8, 64])
def test_no_item_outlasts_its_share(num_workers: int):
    """A short prompt below very many rows is one tile of keys with nearly all the work."""
    layout = make_groups((3, [20] * 30))
    with patch("ratoon.attention.triton.schedule.PARTIAL_COST", 1.0):
        schedule = build_key_schedule(AttentionPlan.build(layout), ROW_TILE, KEY_TILE, num_workers)
    costs = [
        len(listed(schedule.full, item)) + len(listed(schedule.partial, item)) for item in range(len(schedule.tile_I))
    ]
    # A part may be one tile of each state over, since tiles are not cut.
    assert max(costs) <= sum(costs) / num_workers + 2


@given(forests, st.integers(1, 40), st.integers(1, 5))
def test_each_head_of_each_item_is_started_once(layout: PackedLayout, num_workers: int, num_kv_heads: int):
    """Segments of a few rows too, several to a tile."""
    schedule = build_key_schedule(AttentionPlan.build(layout), ROW_TILE, KEY_TILE, num_workers, num_kv_heads)
    assert sorted(schedule.work_P.tolist()) == list(range(len(schedule.tile_I) * num_kv_heads))


costs_and_groups = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=60).map(
    lambda pairs: (np.array([cost for cost, _ in pairs], float), np.array([group for _, group in pairs], int))
)


def makespan(costs: list[float], num_workers: int) -> float:
    busy_until = np.zeros(num_workers)
    for cost in costs:
        busy_until[busy_until.argmin()] += cost
    return float(busy_until.max())


@given(costs_and_groups, st.integers(1, 4))
def test_a_group_runs_head_after_head_the_costliest_first(
    items: tuple[NDArray[np.float64], NDArray[np.intp]], num_kv_heads: int
):
    """One worker is never idle: nothing has to start earlier than it likes."""
    costs_I, group_I = items
    order = order_programs(costs_I, group_I, 1, num_kv_heads).tolist()
    of_group = {group: costs_I[group_I == group].max() for group in group_I.tolist()}
    keys = [
        (-of_group[group_I[item]], group_I[item], head, -costs_I[item])
        for item, head in (divmod(program, num_kv_heads) for program in order)
    ]
    assert keys == sorted(keys) and len(set(order)) == len(costs_I) * num_kv_heads


@given(costs_and_groups, st.integers(1, 30), st.integers(1, 4))
def test_no_worker_waits_much_longer_than_by_falling_cost(
    items: tuple[NDArray[np.float64], NDArray[np.intp]], num_workers: int, num_kv_heads: int
):
    costs_I, group_I = items
    order = order_programs(costs_I, group_I, num_workers, num_kv_heads).tolist()
    assert sorted(order) == list(range(len(costs_I) * num_kv_heads))
    costs = costs_I[np.array(order, int) // num_kv_heads].tolist()
    falling = makespan(sorted(costs, reverse=True), num_workers)
    assert makespan(costs, num_workers) <= (1 + MAX_WAIT) * falling + 1e-9


# Groups, with the most runs of one segment and head that their order may fall into, as a multiple of the fewest.
PACKS = {
    "a long prompt": (make_groups((8192, [1024] * 16)), 1.0),
    "long responses": (make_groups((2048, [4096] * 16)), 2.0),
    "a small pack": (make_groups((2048, [512] * 8)), 2.0),
    "many short responses": (make_groups((8192, [512] * 32)), 1.5),
    "ragged groups": (make_groups(*((1024, [64 + 83 * (i * j % 25) for j in range(8)]) for i in range(16))), 1.0),
    "documents": (pack_documents([[1] * (256 + 349 * (i * 7 % 12)) for i in range(12)]), 2.5),
}


@pytest.mark.parametrize("name", PACKS)
def test_what_reads_the_same_rows_runs_side_by_side_and_ends_together(name: str):
    layout, most_runs = PACKS[name]
    num_workers, num_kv_heads, key_tile = 132, 8, 128
    schedule = build_key_schedule(AttentionPlan.build(layout), 64, key_tile, num_workers, num_kv_heads)
    item_P, head_P = np.divmod(schedule.work_P.numpy(), num_kv_heads)
    costs = np.array(costs_of(schedule))[item_P].tolist()
    assert makespan(costs, num_workers) <= 1.02 * makespan(sorted(costs, reverse=True), num_workers)
    segment_P = np.searchsorted(layout.segment_offsets, schedule.tile_I.numpy()[item_P] * key_tile, side="right")
    of_rows_P = segment_P * num_kv_heads + head_P
    num_runs = 1 + np.count_nonzero(np.diff(of_rows_P))
    assert num_runs <= most_runs * np.unique(of_rows_P).size
