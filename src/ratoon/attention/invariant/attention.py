"""The launch that training, prefill and decoding share, and the pair of kernels of a packed layout."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: T rows, R tiles of rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim, F blocks
# of a cache, N keys of a block.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.attention.alignment import ALIGNMENT_BYTES
from ratoon.attention.invariant.kernels import attend_kernel
from ratoon.attention.invariant.reads import BLOCK_TOKENS, TileReads, tiles_of_plan
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton.attention import backward as backward
from ratoon.attention.triton.descriptors import padded_head_dim
from ratoon.attention.triton.scores import needs_upcast

_NO_WINDOW = 1 << 30
"""More than any position: windows are not specialised on, so that layers without one run the same code."""

_WARPS = 4
_STAGES = 2
_MOST_UNIT = 16


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Rows (tokens times query heads of a key head) and keys of a tile."""

    rows: int
    keys: int
    tokens: int
    """Of one tile of rows: a power of two that divides `keys`."""


def tile_sizes(q_THD: Tensor, group: int, head_dim: int) -> TileSizes:
    """The one choice for all batches, by q's dtype and device.

    group: query heads of a key head. head_dim: the larger one.
    """
    size = 64
    # Multiplied without tensor cores: larger tiles take long to compile.
    if q_THD.dtype == torch.float32 and q_THD.is_cuda:
        size = 32 if padded_head_dim(head_dim) <= 128 else 16
    rows = max(size, 1 << (group - 1).bit_length())
    return TileSizes(rows, size, min(1 << ((rows // group).bit_length() - 1), size))


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """A `ForwardKernel`. Its backward kernel is `ratoon.attention.triton`'s."""
    sizes = tile_sizes(q_THD, q_THD.shape[1] // k_THD.shape[1], max(q_THD.shape[2], v_THE.shape[2]))
    tiles = plan.schedule(tiles_of_plan, sizes.tokens)
    unit = _unit_of(q_THD.shape[2], v_THE.shape[2])
    blocks = (_rows_as_blocks(_in_units(x, unit)) for x in (k_THD, v_THE))
    return attend_tiles(q_THD, *blocks, tiles, scoring, window=plan.window, sinks_H=sinks_H)


def attend_tiles(
    q_THD: Tensor,
    k_FHND: Tensor,
    v_FHNE: Tensor,
    tiles: TileReads,
    scoring: Scoring,
    *,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> out [T, Hq, E] in q's dtype and lse [Hq, T] float32, of the rows that the tiles name.

    tiles: cut at multiples of `tile_sizes(...).tokens`. k, v: aligned blocks of `BLOCK_TOKENS` keys.
    """
    (T, Hq, D), Hkv, E = q_THD.shape, k_FHND.shape[1], v_FHNE.shape[3]
    group = Hq // Hkv
    sizes = tile_sizes(q_THD, group, max(D, E))
    unit = _unit_of(D, E)
    q_THD = _in_units(q_THD, unit)
    assert all(_is_in_units(x, unit) for x in (k_FHND, v_FHNE)), "keys or values are not aligned"
    out_THE = q_THD.new_empty(T, Hq, E)
    lse_HT = q_THD.new_empty(Hq, T, dtype=torch.float32)
    attend_kernel[(tiles.rows_R.shape[0], Hkv)](
        q_THD, k_FHND, v_FHNE, out_THE, lse_HT, sinks_H,
        tiles.rows_R, tiles.counts_R, tiles.ends_R, tiles.own_table_R, tiles.own_position_R,
        tiles.ancestor_offsets_R, tiles.ancestor_table_A, tiles.ancestor_length_A, tiles.ancestor_position_A,
        tiles.blocks_F,
        *(q_THD.stride(dim) // unit for dim in (0, 1)),
        *(k_FHND.stride(dim) // unit for dim in (0, 1, 2)), *(v_FHNE.stride(dim) // unit for dim in (0, 1, 2)),
        T, _NO_WINDOW if window is None else window, scoring.softmax_scale, scoring.softcap or 1.0,
        D=D, E=E, GROUP=group, UNIT=unit, BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_M=sizes.rows, BLOCK_N=sizes.keys, BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(E),
        HAS_SINKS=sinks_H is not None, HAS_SOFTCAP=scoring.softcap is not None, UPCAST=needs_upcast(q_THD),
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out_THE, lse_HT


def _unit_of(head_dim: int, v_head_dim: int) -> int:
    """Elements that every stride is a multiple of, which compiled code knows: the same for all batches of a model."""
    return min(head_dim & -head_dim, v_head_dim & -v_head_dim, _MOST_UNIT)


def _rows_as_blocks(x_THD: Tensor) -> Tensor:
    """A view in which block t begins at row t. Its key i is row t + i, of which the shape says nothing."""
    (T, H, D), (stride_t, stride_h, _) = x_THD.shape, x_THD.stride()
    return x_THD.as_strided((T, H, 1, D), (stride_t, stride_h, stride_t, 1))


def _in_units(x: Tensor, unit: int) -> Tensor:
    return x if _is_in_units(x, unit) else x.clone(memory_format=torch.contiguous_format)


def _is_in_units(x: Tensor, unit: int) -> bool:
    """Strides are multiples of `unit`, and the first element is at an aligned address."""
    is_aligned = x.data_ptr() % ALIGNMENT_BYTES == 0 and x.stride(-1) == 1
    return is_aligned and all(stride % unit == 0 for stride in x.stride()[:-1])
