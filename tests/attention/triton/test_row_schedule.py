"""Which rows a program of the forward kernel takes, in which order."""

# Shape letters: R tiles of rows, P pieces of work, W programs, H query heads.

import itertools

import numpy as np
import pytest
from tests.attention.oracle import make_groups

from ratoon.attention import AttentionPlan
from ratoon.attention.tiles import build_tile_map
from ratoon.attention.triton.schedule import PARTIAL_COST, START_COST, build_row_schedule, build_row_work

ROW_TILE, KEY_TILE = 48, 32
PLAN = AttentionPlan.build(make_groups((100, [60, 30]), (300, [200, 40, 7]), (20, [5])))
FIRST_ROW_OF_TREES = np.cumsum([0, 190, 547])


@pytest.mark.parametrize("num_workers", [1, 3, 200])
@pytest.mark.parametrize("mixes_heads", [False, True])
def test_every_head_of_every_tile_is_someones_work(num_workers: int, mixes_heads: bool):
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, 4, num_workers, is_persistent=True, mixes_heads=mixes_heads)
    assert work.offsets_W is not None
    num_tiles = -(-PLAN.num_rows // ROW_TILE)
    assert sorted(work.work_P.tolist()) == list(range(4 * num_tiles))
    assert work.offsets_W.numel() == num_workers + 1
    assert work.offsets_W[0] == 0
    assert work.offsets_W[-1] == 4 * num_tiles


def test_a_program_keeps_the_order_and_no_program_waits_long():
    num_heads, schedule = 8, build_row_schedule(PLAN, ROW_TILE, KEY_TILE)
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, num_heads, 5, is_persistent=True)
    assert work.offsets_W is not None
    num_tiles = schedule.tile_R.numel()
    state_RK = build_tile_map(PLAN.layout, None, row_tile=ROW_TILE, key_tile=KEY_TILE).state_RK
    costs_R = np.array([0.0, PARTIAL_COST, 1.0])[state_RK].sum(axis=1) + START_COST
    place_R = np.argsort(schedule.tile_R.numpy())
    loads: list[float] = []
    for first, last in itertools.pairwise(work.offsets_W.tolist()):
        own = work.work_P[first:last].numpy()
        assert (np.diff(own // num_tiles * num_tiles + place_R[own % num_tiles]) > 0).all()
        loads.append(costs_R[own % num_tiles].sum())
    assert max(loads) - min(loads) <= costs_R.max()


def test_rows_of_one_tree_follow_one_another():
    tile_R = build_row_work(PLAN, ROW_TILE, KEY_TILE, 1, 5, is_by_tree=True).work_P.numpy()
    tree_R = np.searchsorted(FIRST_ROW_OF_TREES, tile_R * ROW_TILE, side="right") - 1
    assert tree_R.tolist() == sorted(tree_R.tolist(), key=[1, 0, 2].index)
    assert sorted(tile_R.tolist()) == list(range(tree_R.size))


def test_the_last_heads_are_mixed():
    """Of many heads the first ones go one after the other; of two programs' worth, all are mixed."""
    num_heads, num_tiles = 64, -(-PLAN.num_rows // ROW_TILE)
    plain, mixed = (
        build_row_work(PLAN, ROW_TILE, KEY_TILE, num_heads, 5, mixes_heads=mixes_heads).work_P.numpy() // num_tiles
        for mixes_heads in (False, True)
    )
    assert plain.tolist() == np.repeat(np.arange(num_heads), num_tiles).tolist()
    num_changes = np.flatnonzero(plain != mixed)
    first_mixed = num_changes[0] // num_tiles
    assert num_heads // 2 < first_mixed < num_heads - 1
    assert mixed[first_mixed * num_tiles :][: num_heads - first_mixed].tolist() == list(range(first_mixed, num_heads))


def test_keys_come_with_what_says_who_reads_them():
    terms = build_row_schedule(PLAN, ROW_TILE, KEY_TILE).key_terms.numpy()
    T = PLAN.num_rows
    assert terms.shape[1] % KEY_TILE == 0
    assert (terms[:, T:] == 0).all()
    assert terms.shape[1] - T < KEY_TILE
    assert (terms[0, :T] + np.arange(T) == PLAN.layout.expiry_T).all()
    assert (terms[1, :T] == PLAN.layout.positions_T).all()
