"""The forest as lists of tiles, for kernels that walk one: the key tiles of a row tile, or the other way round."""

# Shape letters: R tiles of rows, K tiles of keys, B tiles that have a list, I tiles in the longest list.

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import TileState, build_tile_map


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLists:
    """Ascending tile numbers of the other side; int32, one batch and one head, which all heads share."""

    row_tile: int
    key_tile: int

    num_partial_11B: Tensor
    partial_11BI: Tensor
    """Tiles of which the kernel must ask the rule of every pair: the first `num_partial` of each list."""

    num_full_11B: Tensor
    full_11BI: Tensor
    """Tiles of which every row reads every key."""


def build_block_lists(
    plan: AttentionPlan, row_tile: int, key_tile: int, lists_of: Literal["rows", "keys"]
) -> BlockLists:
    """lists_of: "rows" gives each tile of rows its tiles of keys (for a forward pass), "keys" the other way round."""
    tile_map = build_tile_map(plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile)
    state_BO = tile_map.state_RK if lists_of == "rows" else tile_map.state_RK.T
    num_partial, partial = _lists(state_BO == TileState.PARTIAL, plan.device)
    num_full, full = _lists(state_BO == TileState.FULL, plan.device)
    return BlockLists(
        row_tile=row_tile,
        key_tile=key_tile,
        num_partial_11B=num_partial,
        partial_11BI=partial,
        num_full_11B=num_full,
        full_11BI=full,
    )


def _lists(is_in_BO: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, B], and numbers [1, 1, B, I] of the tiles that are in; I is at least 1."""
    counts_B = is_in_BO.sum(axis=1)
    numbers_BI = np.zeros((counts_B.size, max(1, int(counts_B.max(initial=0)))), np.int32)
    tiles, numbers = np.nonzero(is_in_BO)
    first_of_B = np.cumsum(counts_B) - counts_B
    numbers_BI[tiles, np.arange(tiles.size) - first_of_B[tiles]] = numbers
    return (
        torch.tensor(counts_B.astype(np.int32), device=device)[None, None],
        torch.tensor(numbers_BI, device=device)[None, None],
    )
