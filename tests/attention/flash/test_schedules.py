"""What the kernels are told to compute is the forest: every pair once, nothing else."""

# Shape letters: T rows.

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.flash.fake_runs import mask_of_tiles
from tests.attention.oracle import dense_mask, forests, make_chain, make_groups
from torch import Tensor

from ratoon.attention import AttentionPlan
from ratoon.attention.flash.block_lists import build_block_lists
from ratoon.attention.flash.levels import OwnRuns, build_covering_levels, build_levels
from ratoon.layout import PackedLayout, pack_documents

some_forests = forests.filter(lambda layout: layout.num_rows > 0)


def pairs_of_own_runs(own: OwnRuns, num_rows: int) -> Tensor:
    """[T, T] int: how often each row reads each key."""
    counts_TT = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    assert own.offsets[0] == 0 and own.offsets[-1] == num_rows and own.max_rows == own.offsets.diff().max()
    for start, end in pairwise(own.offsets.tolist()):
        counts_TT[start:end, start:end] += torch.ones(end - start, end - start, dtype=torch.int64).tril()
    return counts_TT


@given(layout=some_forests)
@settings(max_examples=60)
def test_levels_are_the_forest(layout: PackedLayout):
    levels = build_levels(AttentionPlan.build(layout))
    counts_TT = pairs_of_own_runs(levels.own, layout.num_rows)
    for level in levels.ancestors:
        assert level.max_queries == level.num_queries.max() and level.max_keys == level.num_keys.max()
        reads_T, is_read_T = (torch.zeros(layout.num_rows, dtype=torch.int64) for _ in range(2))
        for q0, num_queries, k0, num_keys in zip(
            *(level.query_starts.tolist(), level.num_queries.tolist()),
            *(level.key_starts.tolist(), level.num_keys.tolist()),
            strict=False,
        ):
            counts_TT[q0 : q0 + num_queries, k0 : k0 + num_keys] += 1
            reads_T[q0 : q0 + num_queries] += 1
            is_read_T[k0 : k0 + num_keys] += 1
        # A row or key of two runs would lose a gradient; one that is not marked, all that the level adds.
        assert torch.equal(reads_T, level.reads_T.long()) and torch.equal(is_read_T, level.is_read_T.long())
    assert torch.equal(counts_TT, dense_mask(layout).long())


@given(layout=some_forests)
@settings(max_examples=60)
def test_covering_levels_are_the_forest(layout: PackedLayout):
    levels = build_covering_levels(AttentionPlan.build(layout))
    counts_TT = pairs_of_own_runs(levels.own, layout.num_rows)
    rows_T = torch.arange(layout.num_rows)
    for level in levels.ancestors:
        keys = rows_T[level.key_rows]
        assert level.query_offsets[0] == 0 and level.query_offsets[-1] == layout.num_rows
        assert level.key_offsets[0] == 0 and level.key_offsets[-1] == keys.numel()
        reads_T = torch.zeros(layout.num_rows, dtype=torch.bool)
        for (q0, q1), (k0, k1) in zip(
            pairwise(level.query_offsets.tolist()), pairwise(level.key_offsets.tolist()), strict=True
        ):
            assert q1 - q0 >= 0 and 0 <= k1 - k0 <= level.max_keys
            if k1 > k0:
                assert 0 < q1 - q0 <= level.max_queries
                counts_TT[q0:q1, keys[k0:k1]] += 1
                reads_T[q0:q1] = True
        assert torch.equal(reads_T, level.reads_T)
    assert torch.equal(counts_TT, dense_mask(layout).long())


@given(layout=some_forests, row_tile=st.integers(1, 9), key_tile=st.integers(1, 9), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_block_lists_are_the_forest(layout: PackedLayout, row_tile: int, key_tile: int, seed: int):
    plan = AttentionPlan.build(layout)

    def rule(rows: Tensor, keys: Tensor) -> Tensor:
        return (keys <= rows) & (rows < plan.expiry_T[keys])

    lists = build_block_lists(plan, row_tile, key_tile)
    mask_TT = mask_of_tiles(
        layout.num_rows,
        (lists.row_tile, lists.key_tile),
        [(lists.num_partial_11R, lists.partial_11RI, False), (lists.num_full_11R, lists.full_11RI, True)],
        rule,
    )
    assert torch.equal(mask_TT, dense_mask(layout))


def test_most_work_is_in_full_tiles():
    """Only full tiles run without asking the rule of every pair."""
    plan = AttentionPlan.build(make_groups((1024, [256] * 4)))
    lists = build_block_lists(plan, 128, 128)
    assert lists.num_partial_11R.sum() == 16, "one for each tile on the diagonal"
    assert lists.num_full_11R.sum() == 8 * 7 // 2 + 4 * (2 * 8 + 1)


def test_lists_take_memory_for_what_they_hold():
    """Not for all pairs of tiles: a pack of documents reads few."""
    plan = AttentionPlan.build(pack_documents([np.zeros(64, np.int64)] * 256))
    lists = build_block_lists(plan, 64, 64)
    assert lists.partial_11RI.shape == (1, 1, 256, 1) and lists.full_11RI.shape == (1, 1, 256, 1)


@pytest.mark.parametrize(
    ("layout", "num_levels"),
    [
        (pack_documents([[1], [1, 2]]), 0),
        (make_groups((3, [2, 1])), 1),
        (make_groups(*[(3, [2, 5])] * 9), 1),
        (make_chain(6, 2), 6),
    ],
)
def test_a_level_is_one_call_whatever_the_number_of_groups(layout: PackedLayout, num_levels: int):
    plan = AttentionPlan.build(layout)
    assert len(build_levels(plan).ancestors) == len(build_covering_levels(plan).ancestors) == num_levels
