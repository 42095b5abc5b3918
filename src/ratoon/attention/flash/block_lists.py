"""The forest as lists of tiles, for kernels that walk the key tiles of a row tile."""

# Shape letters: R tiles of rows, K tiles of keys, I tiles in the longest list.

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import TileState, build_tile_map
from ratoon.attention.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLists:
    """For each tile of rows, ascending numbers of tiles of keys. int32; one batch, one head for all."""

    row_tile: int
    key_tile: int

    num_partial_11R: Tensor
    partial_11RI: Tensor
    """Tiles of which the kernel must ask the rule of every pair: the first `num_partial` of each list."""

    num_full_11R: Tensor
    full_11RI: Tensor
    """Tiles of which every row reads every key."""


def build_block_lists(plan: AttentionPlan, row_tile: int, key_tile: int) -> BlockLists:
    tile_map = build_tile_map(
        plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile, first_query_row=plan.first_query_row
    )
    num_partial, partial = _lists(tile_map.state_RK == TileState.PARTIAL, plan.device)
    num_full, full = _lists(tile_map.state_RK == TileState.FULL, plan.device)
    return BlockLists(
        row_tile=row_tile,
        key_tile=key_tile,
        num_partial_11R=num_partial,
        partial_11RI=partial,
        num_full_11R=num_full,
        full_11RI=full,
    )


def _lists(is_in_RK: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, R], and numbers [1, 1, R, I] of the tiles that are in; I is at least 1."""
    counts_R = is_in_RK.sum(axis=1)
    numbers_RI = np.zeros((counts_R.size, max(1, int(counts_R.max(initial=0)))), np.int32)
    tiles, numbers = np.nonzero(is_in_RK)
    first_of_R = np.cumsum(counts_R) - counts_R
    numbers_RI[tiles, np.arange(tiles.size) - first_of_R[tiles]] = numbers
    return (
        to_device(counts_R.astype(np.int32), device)[None, None],
        to_device(numbers_RI, device)[None, None],
    )
