"""Which rows a program of the forward kernel takes, in which order."""

# Shape letters: R tiles of rows, P pieces of work, W programs, H query heads.

import itertools

import numpy as np
import pytest
from tests.attention.oracle import make_groups

from ratoon.attention import AttentionPlan
from ratoon.attention.tiles import build_tile_map
from ratoon.attention.triton import schedule
from ratoon.attention.triton.schedule import PARTIAL_COST, START_COST, build_row_schedule, build_row_work

ROW_TILE, KEY_TILE = 48, 32
PLAN = AttentionPlan.build(make_groups((100, [60, 30]), (300, [200, 40, 7]), (20, [5])))


@pytest.mark.parametrize("num_workers", [1, 3, 200])
def test_every_head_of_every_tile_is_someones_work(num_workers: int):
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, 4, num_workers)
    num_tiles = -(-PLAN.num_rows // ROW_TILE)
    assert sorted(work.work_P.tolist()) == list(range(4 * num_tiles))
    assert work.offsets_W.numel() == num_workers + 1
    assert work.offsets_W[0] == 0
    assert work.offsets_W[-1] == 4 * num_tiles


@pytest.mark.parametrize("num_workers", [1, 5, 32])
def test_no_program_waits_long(num_workers: int):
    num_heads, num_tiles = 8, -(-PLAN.num_rows // ROW_TILE)
    work = build_row_work(PLAN, ROW_TILE, KEY_TILE, num_heads, num_workers)
    state_RK = build_tile_map(PLAN.layout, None, row_tile=ROW_TILE, key_tile=KEY_TILE).state_RK
    costs_R = np.array([0.0, PARTIAL_COST, 1.0])[state_RK].sum(axis=1) + START_COST
    spans = itertools.pairwise(work.offsets_W.tolist())
    loads = [costs_R[work.work_P[first:last].numpy() % num_tiles].sum() for first, last in spans]
    assert max(loads) - min(loads) <= costs_R.max()
    assert max(loads) <= sum(loads) / num_workers + costs_R.max()


def test_heads_one_after_the_other_and_the_last_ones_mixed(monkeypatch: pytest.MonkeyPatch):
    """Of one program all work is in the order in which it starts; it needs no mixed work, and gets some here."""
    monkeypatch.setattr(schedule, "MIXED_ITEMS", 50)
    num_heads, num_tiles = 64, -(-PLAN.num_rows // ROW_TILE)
    by_falling_cost = build_row_schedule(PLAN, ROW_TILE, KEY_TILE).tile_R.numpy()
    head_P, tile_P = np.divmod(build_row_work(PLAN, ROW_TILE, KEY_TILE, num_heads, 1).work_P.numpy(), num_tiles)
    first_mixed = int(np.flatnonzero(np.diff(head_P) < 0)[0] // num_tiles)
    assert num_heads // 2 < first_mixed < num_heads - 1
    num_plain = first_mixed * num_tiles
    assert head_P[:num_plain].tolist() == np.repeat(np.arange(first_mixed), num_tiles).tolist()
    assert tile_P[:num_plain].tolist() == by_falling_cost.tolist() * first_mixed
    assert tile_P[num_plain:].tolist() == np.repeat(by_falling_cost, num_heads - first_mixed).tolist()


def test_keys_come_with_what_says_who_reads_them():
    terms = build_row_schedule(PLAN, ROW_TILE, KEY_TILE).key_terms.numpy()
    T = PLAN.num_rows
    assert terms.shape[1] % KEY_TILE == 0
    assert (terms[:, T:] == 0).all()
    assert terms.shape[1] - T < KEY_TILE
    assert (terms[0, :T] + np.arange(T) == PLAN.layout.expiry_T).all()
    assert (terms[1, :T] == PLAN.layout.positions_T).all()
