"""Every pair of tiles that the map lists is somebody's work, once, whatever the order and the splits."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attention.oracle import forests, make_groups

from ratoon.attention import AttentionPlan
from ratoon.attention.tiles import TileState, build_tile_map
from ratoon.attention.triton.schedule import DeviceIntervals, build_key_schedule, build_row_schedule
from ratoon.layout import PackedLayout

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
    assert costs == sorted(costs, reverse=True)
