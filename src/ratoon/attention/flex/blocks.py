"""The forest's mask as FlexAttention reads it: lists of tiles for each tile, and the rule's three numbers a row."""

# Shape letters: T rows, padded to whole tiles; R tiles of rows, K of keys; A tiles of either side, B of the other.

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.tiles import TileState, build_tile_map
from ratoon.attention.transfer import to_device

MIN_TILES = 2
"""A size of one would be compiled in as a constant, and the next length would compile anew."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileLists:
    """For each tile of one side, the tiles of the other in one state: the first `num` of its row, ascending."""

    num_11A: Tensor
    """[1, 1, A] int32."""

    tiles_11AB: Tensor
    """[1, 1, A, B] int32, contiguous. What stands behind the first `num` is a valid tile, and is not read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexBlocks:
    """Everything on the device that FlexAttention asks of a plan. Sizes that differ between plans are marked dynamic.

    Rows are padded to whole tiles. A row of padding reads itself (and keys whose tile is full for its tile of rows),
    so that no softmax is empty, and no row of the layout reads it.
    """

    num_rows: int
    """T, padding included."""

    row_tile: int
    key_tile: int

    partial_keys: TileLists
    full_keys: TileLists
    partial_rows: TileLists
    full_rows: TileLists

    expiry_T: Tensor
    """[T] int32."""

    positions_T: Tensor | None
    """[T] int32. None without a window."""

    floor_T: Tensor | None
    """[T] int32. A row reads only keys at logical positions above its floor; None without a window.

    A tensor, for a number in a mask is compiled in; and once it has changed it is a symbol, which the
    FlashAttention-4 back end refuses.
    """


def build_flex_blocks(plan: AttentionPlan, row_tile: int, key_tile: int) -> FlexBlocks:
    """Looks at tiles, not at pairs of rows; the lists are sorted on the device. For `plan.schedule`."""
    largest, smallest = max(row_tile, key_tile), min(row_tile, key_tile)
    assert largest % smallest == 0, f"tiles of {row_tile} rows and {key_tile} keys have no common multiple of use"
    num_rows = max(-(-plan.num_rows // largest), MIN_TILES) * largest
    state_RK = to_device(_padded_states(plan, num_rows, row_tile, key_tile), plan.device)
    is_partial_RK, is_full_RK = state_RK == TileState.PARTIAL, state_RK == TileState.FULL

    positions_T = floor_T = None
    if plan.window is not None:
        positions_T = _padded(plan.positions_T, plan.positions_T.new_zeros(num_rows))
        floor_T = _padded(plan.positions_T - plan.window, plan.positions_T.new_full((num_rows,), -1))
    blocks = FlexBlocks(
        num_rows=num_rows,
        row_tile=row_tile,
        key_tile=key_tile,
        partial_keys=_tile_lists(is_partial_RK),
        full_keys=_tile_lists(is_full_RK),
        partial_rows=_tile_lists(is_partial_RK.T),
        full_rows=_tile_lists(is_full_RK.T),
        expiry_T=_padded(plan.expiry_T, torch.arange(1, num_rows + 1, dtype=torch.int32, device=plan.device)),
        positions_T=positions_T,
        floor_T=floor_T,
    )
    _mark_dynamic(blocks)
    return blocks


def _padded_states(plan: AttentionPlan, num_rows: int, row_tile: int, key_tile: int) -> np.ndarray:
    """[R, K] uint8 `TileState` of the padded rows."""
    state_RK = np.full((num_rows // row_tile, num_rows // key_tile), TileState.UNREAD, np.uint8)
    known = build_tile_map(
        plan.layout, plan.window, row_tile=row_tile, key_tile=key_tile, first_query_row=plan.first_query_row
    ).state_RK
    state_RK[: known.shape[0], : known.shape[1]] = known
    padding = np.arange(plan.num_rows, num_rows)
    # The last key tile of the layout, if short, is never full: nothing is lost here.
    state_RK[padding // row_tile, padding // key_tile] = TileState.PARTIAL
    return state_RK


def _tile_lists(is_in_AB: Tensor) -> TileLists:
    """A stable sort brings what is in to the front, in order."""
    # Sorting a transposed tensor gives transposed strides; the kernels count on rows of tile numbers.
    tiles_AB = torch.argsort(is_in_AB.to(torch.uint8), dim=1, descending=True, stable=True)
    return TileLists(
        num_11A=is_in_AB.sum(dim=1, dtype=torch.int32)[None, None],
        tiles_11AB=tiles_AB.to(torch.int32, memory_format=torch.contiguous_format)[None, None],
    )


def _padded(values_T: Tensor, padding_T: Tensor) -> Tensor:
    """`padding_T` with its first entries replaced."""
    padding_T[: values_T.shape[0]] = values_T
    return padding_T


def _mark_dynamic(blocks: FlexBlocks) -> None:
    for lists in (blocks.partial_keys, blocks.full_keys, blocks.partial_rows, blocks.full_rows):
        torch._dynamo.mark_dynamic(lists.num_11A, 2)
        torch._dynamo.mark_dynamic(lists.tiles_11AB, [2, 3])
    for values_T in (blocks.expiry_T, blocks.positions_T, blocks.floor_T):
        if values_T is not None:
            torch._dynamo.mark_dynamic(values_T, 0)
