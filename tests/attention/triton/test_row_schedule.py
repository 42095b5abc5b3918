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
def test_every_head_of_every_tile_is_someones_work(num_workers: int):
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, 4, num_workers)
    num_tiles = -(-PLAN.num_rows // ROW_TILE)
    assert sorted(work.work_P.tolist()) == list(range(4 * num_tiles))
    assert work.offsets_W.numel() == num_workers + 1
    assert work.offsets_W[0] == 0
    assert work.offsets_W[-1] == 4 * num_tiles


def test_a_program_keeps_the_order_and_no_program_waits_long():
    num_heads, schedule = 8, build_row_schedule(PLAN, ROW_TILE, KEY_TILE)
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, num_heads, 5)
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
    schedule = build_row_schedule(PLAN, ROW_TILE, KEY_TILE, is_by_tree=True)
    tree_R = np.searchsorted(FIRST_ROW_OF_TREES, schedule.tile_R.numpy() * ROW_TILE, side="right") - 1
    assert tree_R.tolist() == sorted(tree_R.tolist(), key=[1, 0, 2].index)
    assert sorted(schedule.tile_R.tolist()) == list(range(tree_R.size))


def test_keys_come_with_what_says_who_reads_them():
    terms = build_row_schedule(PLAN, ROW_TILE, KEY_TILE).key_terms.numpy()
    T = PLAN.num_rows
    assert terms.shape[1] % KEY_TILE == 0
    assert (terms[:, T:] == 0).all()
    assert terms.shape[1] - T < KEY_TILE
    assert (terms[0, :T] + np.arange(T) == PLAN.layout.expiry_T).all()
    assert (terms[1, :T] == PLAN.layout.positions_T).all()
