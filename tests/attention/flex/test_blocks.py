"""FlexAttention's tile lists against the rule, and against torch's own bookkeeping."""

# Shape letters: T rows, R tiles of rows, K tiles of keys.

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.attention.oracle import dense_mask, forests, make_groups
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ratoon.attention import AttentionPlan
from ratoon.attention.flex.blocks import FlexBlocks, build_flex_blocks
from ratoon.layout import PackedLayout

tilings = st.sampled_from([(4, 4), (8, 4), (4, 8), (1, 1), (16, 8)])
windows = st.sampled_from([None, 1, 3, 7])


def block_mask_of(blocks: FlexBlocks) -> BlockMask:
    lists = (blocks.partial_keys, blocks.full_keys, blocks.partial_rows, blocks.full_rows)
    tensors = [tensor for each in lists for tensor in (each.num_11A, each.tiles_11AB)]
    return BlockMask(
        (blocks.num_rows, blocks.num_rows),
        *tensors,
        BLOCK_SIZE=(blocks.row_tile, blocks.key_tile),
        mask_mod=lambda _batch, _head, row, key: mask_of(blocks)[row, key],
    )


def mask_of(blocks: FlexBlocks) -> Tensor:
    """[T, T] bool: the rule, as the kernels ask it, of every pair of padded rows."""
    row_T1, key_T = torch.arange(blocks.num_rows)[:, None], torch.arange(blocks.num_rows)
    mask_TT = (key_T <= row_T1) & (row_T1 < blocks.expiry_T)
    if blocks.positions_T is not None and blocks.floor_T is not None:
        mask_TT &= blocks.positions_T > blocks.floor_T[:, None]
    return mask_TT


def per_pair(state_RK: Tensor, blocks: FlexBlocks) -> Tensor:
    return state_RK.repeat_interleave(blocks.row_tile, 0).repeat_interleave(blocks.key_tile, 1)


@given(forests, windows, tilings)
def test_no_pair_is_lost_and_full_tiles_are_full(layout: PackedLayout, window: int | None, tiles: tuple[int, int]):
    blocks = build_flex_blocks(AttentionPlan.build(layout, window=window), *tiles)
    T = layout.num_rows
    mask_TT = mask_of(blocks)
    assert torch.equal(mask_TT[:T, :T], dense_mask(layout, window))
    empty = blocks.partial_keys.num_11A * 0
    full = BlockMask.from_kv_blocks(
        blocks.full_keys.num_11A, blocks.full_keys.tiles_11AB, empty, blocks.full_keys.tiles_11AB, tiles
    ).to_dense()[0, 0]
    is_full_TT = per_pair(full.bool(), blocks)
    assert mask_TT[:T][is_full_TT[:T]].all()
    is_looked_at_TT = per_pair(block_mask_of(blocks).to_dense()[0, 0].bool(), blocks)
    assert not (mask_TT & ~is_looked_at_TT).any()


@given(forests, windows, tilings)
def test_padding_reads_itself_and_is_not_read(layout: PackedLayout, window: int | None, tiles: tuple[int, int]):
    """Kernels see whole tiles only; odd lengths gave NaN or wrong gradients: pytorch#153799, #159247, #136232.

    A row without a key has no softmax: its log-sum-exp is -inf, and what a backward kernel makes of it may be NaN.
    """
    blocks = build_flex_blocks(AttentionPlan.build(layout, window=window), *tiles)
    mask_TT = mask_of(blocks)
    T = layout.num_rows
    assert not mask_TT[:T, T:].any() and not mask_TT[T:, :T].any()
    assert torch.equal(mask_TT[T:, T:], torch.eye(blocks.num_rows - T, dtype=torch.bool))
    assert blocks.num_rows % max(tiles) == 0 and blocks.num_rows >= 2 * max(tiles)


@given(forests, windows, tilings)
def test_lists_are_as_torch_makes_them(layout: PackedLayout, window: int | None, tiles: tuple[int, int]):
    """The kernels read both kinds with the strides of one, and the tiles of a list as neighbours in memory."""
    blocks = build_flex_blocks(AttentionPlan.build(layout, window=window), *tiles)
    wanted = BlockMask.from_kv_blocks(
        blocks.partial_keys.num_11A,
        blocks.partial_keys.tiles_11AB,
        blocks.full_keys.num_11A,
        blocks.full_keys.tiles_11AB,
        BLOCK_SIZE=tiles,
        seq_lengths=(blocks.num_rows, blocks.num_rows),
    )
    assert wanted.q_num_blocks is not None and wanted.full_q_num_blocks is not None
    assert torch.equal(blocks.partial_rows.num_11A, wanted.q_num_blocks)
    assert torch.equal(blocks.full_rows.num_11A, wanted.full_q_num_blocks)
    for lists, indices in ((blocks.partial_rows, wanted.q_indices), (blocks.full_rows, wanted.full_q_indices)):
        assert indices is not None and torch.equal(lists.tiles_11AB, indices)
    for lists in (blocks.partial_keys, blocks.full_keys, blocks.partial_rows, blocks.full_rows):
        for tensor in (lists.num_11A, lists.tiles_11AB):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert blocks.partial_keys.tiles_11AB.stride() == blocks.full_keys.tiles_11AB.stride()
    assert blocks.partial_rows.tiles_11AB.stride() == blocks.full_rows.tiles_11AB.stride()


def test_lists_are_built_once_a_plan():
    plan = AttentionPlan.build(make_groups((5, [3, 4])))
    assert plan.schedule(build_flex_blocks, 8, 8) is plan.schedule(build_flex_blocks, 8, 8)
    assert plan.schedule(build_flex_blocks, 8, 8) is not plan.schedule(build_flex_blocks, 16, 8)


@pytest.mark.parametrize("window", [None, 100])
def test_most_tiles_of_a_group_are_full_or_skipped(window: int | None):
    """What the tile map knows is not lost on the way: tiles that are looked at pair by pair are a few a row."""
    blocks = build_flex_blocks(AttentionPlan.build(make_groups((1024, [256] * 4)), window=window), 128, 128)
    num_partial = blocks.partial_keys.num_11A.sum().item()
    num_full = blocks.full_keys.num_11A.sum().item()
    assert (num_partial, num_full) == ((16, 28 + 4 * (16 + 1)) if window is None else (8 + 7 + 4 * (2 + 2), 0))
