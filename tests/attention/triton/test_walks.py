"""Each item's rows visit each of its programs once, in an order in which neighbours read the same and add elsewhere."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attention.oracle import forests, make_groups

from ratoon.attention import AttentionPlan
from ratoon.attention.triton import walks
from ratoon.attention.triton.schedule import DeviceIntervals, build_key_schedule
from ratoon.attention.triton.walks import KeyWalks, Walk, build_key_walks
from ratoon.layout import PackedLayout

ROW_TILE, KEY_TILE = 2, 3


def tiles_of(intervals: DeviceIntervals, index: int, is_from_end: bool) -> list[int]:
    """In the order in which the kernel takes them."""
    first, stop = intervals.offsets[index : index + 2].tolist()
    spans = zip(intervals.start_J[first:stop].tolist(), intervals.end_J[first:stop].tolist(), strict=True)
    return [tile for start, end in spans for tile in range(start, end)[:: -1 if is_from_end else 1]]


@pytest.mark.parametrize("walk", list(Walk))
@given(forests, st.sampled_from([None, 3]), st.integers(1, 9), st.integers(1, 3), st.integers(1, 5))
def test_each_program_is_visited_by_its_items_rows_once(
    walk: Walk, layout: PackedLayout, window: int | None, num_workers: int, num_kv_heads: int, group_size: int
):
    plan = AttentionPlan.build(layout, window=window)
    with patch.object(walks, "CROWD", 2):
        of_programs = build_key_walks(plan, ROW_TILE, KEY_TILE, num_workers, num_kv_heads, group_size, walk)
    items = build_key_schedule(plan, ROW_TILE, KEY_TILE, num_workers, num_kv_heads)
    assert of_programs.items.work_P.tolist() == items.work_P.tolist()
    is_from_end = walk is not Walk.FROM_START
    for program, work in enumerate(items.work_P.tolist()):
        item = work // num_kv_heads
        partial = tiles_of(of_programs.partial, program, is_from_end)
        assert partial == sorted(tiles_of(items.partial, item, False), reverse=is_from_end)
        full = tiles_of(of_programs.full, program, is_from_end)
        in_order = sorted(tiles_of(items.full, item, False), reverse=is_from_end)
        assert sorted(full) == sorted(in_order)
        # They go round: what was left out comes last, in the same direction.
        first = in_order.index(full[0]) if full else 0
        assert full == in_order[first:] + in_order[:first]
        if walk in (Walk.FROM_START, Walk.FROM_END):
            assert first == 0 and of_programs.turn_P[program] == 0
        assert 0 <= of_programs.turn_P[program] < group_size


def shifts_of(of_programs: KeyWalks, num_kv_heads: int, group_size: int) -> dict[tuple[int, int], int]:
    """(item, key head) -> steps, of a tile of one head, from the item's end to where it starts."""
    shifts: dict[tuple[int, int], int] = {}
    for program, work in enumerate(of_programs.items.work_P.tolist()):
        full = tiles_of(of_programs.full, program, True)
        if full:
            steps = sorted(full, reverse=True).index(full[0]) * group_size + int(of_programs.turn_P[program])
            shifts[divmod(work, num_kv_heads)] = steps
    return shifts


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_a_crowd_starts_one_step_apart_and_others_at_their_end(group_size: int):
    """Two groups, with 64 items of a prompt and 48 of responses each."""
    plan = AttentionPlan.build(make_groups((8192, [1024] * 6), (8192, [1024] * 6)))
    of_programs = build_key_walks(plan, 64, 128, 132, 8, group_size, Walk.STAGGERED)
    for (item, _), steps in shifts_of(of_programs, 8, group_size).items():
        assert steps == (item % 112 if item % 112 < 64 else 0)


def test_as_many_places_as_programs_that_run_at_once():
    plan = AttentionPlan.build(make_groups((8192, [64])))
    of_programs = build_key_walks(plan, 64, 128, 20, 1, 2, Walk.STAGGERED)
    shifts = shifts_of(of_programs, 1, 2)
    assert [shifts[item, 0] for item in range(50)] == [item % 20 for item in range(50)]


def test_who_starts_late_joins_those_that_run():
    """Four programs run: a head's first four items take the longest, and the next start one by one as those end."""
    layout, num_workers, num_kv_heads = make_groups((16 * KEY_TILE, [240])), 4, 2
    plan = AttentionPlan.build(layout)
    with patch.object(walks, "CROWD", 16):
        of_programs = build_key_walks(plan, ROW_TILE, KEY_TILE, num_workers, num_kv_heads, 1, Walk.JOINING)
    items = of_programs.items
    free_at = np.zeros(num_workers)
    first_start: dict[int, float] = {}
    num_joined = 0
    for program, work in enumerate(items.work_P.tolist()):
        item, head = divmod(work, num_kv_heads)
        full = tiles_of(of_programs.full, program, True)
        start = float(free_at.min())
        free_at[free_at.argmin()] += len(full) + 1.4 * len(tiles_of(items.partial, item, False))
        if item >= 16:  # the response's
            continue
        behind = int(start - first_start.setdefault(head, start))
        if behind >= len(full):  # the crowd is below this item's rows
            first_start[head], behind = start, 0
        num_joined += behind > 0
        assert full[0] == max(full) - (behind + item % num_workers) % len(full)
    assert num_joined >= 8 and len(set(first_start.values())) == num_kv_heads, "the case no longer has crowds to join"
