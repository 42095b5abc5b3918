"""The launches of the Hopper kernels."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

from functools import cache
from typing import cast

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton.blocks import GROUP_ROWS, HopperBlocks
from ratoon.attention.triton.descriptors import aligned, padded_head_dim
from ratoon.attention.triton.hopper.adding import adding_kernel
from ratoon.attention.triton.hopper.backward import backward_kernel
from ratoon.attention.triton.hopper.backward_wide import backward_wide_kernel
from ratoon.attention.triton.hopper.forward import forward_kernel
from ratoon.attention.triton.hopper.forward_wide import forward_wide_kernel
from ratoon.attention.triton.machine import machine_of
from ratoon.attention.triton.schedule import KeySchedule, RowSchedule, build_row_work

NUM_WARPS = 4
"""Of each group."""


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, sinks_H: Tensor | None, out_THD: Tensor, lse_HT: Tensor,
    plan: AttentionPlan, scoring: Scoring, schedule: RowSchedule, blocks: HopperBlocks,
) -> None:  # fmt: skip
    """Writes out and lse; the schedule has the blocks' tiles."""
    T, Hq, D = q_THD.shape
    num_tiles = schedule.tile_R.shape[0]
    if blocks.is_wide:
        forward_wide_kernel[(num_tiles * Hq,)](
            _tiles(q_THD, blocks.forward_rows), _tiles(k_THD, blocks.forward_keys),
            _tiles(v_THD, blocks.forward_keys, D // 2), _tiles(out_THD, blocks.forward_rows, D // 2),
            sinks_H, lse_HT, plan.expiry_T, plan.positions_T,
            schedule.tile_R, *schedule.full, *schedule.partial,
            lse_HT.stride(0), T, num_tiles, scoring.softmax_scale, plan.window,
            GROUP=Hq // k_THD.shape[1], BLOCK_M=blocks.forward_rows, BLOCK_N=blocks.forward_keys,
            HAS_SINKS=sinks_H is not None, HAS_WINDOW=plan.window is not None, num_warps=NUM_WARPS,
        )  # fmt: skip
        return
    num_workers = machine_of(q_THD.device).num_multiprocessors
    work = plan.schedule(build_row_work, blocks.forward_rows, blocks.forward_keys, Hq, num_workers)
    forward_kernel[(min(num_workers, num_tiles * Hq),)](
        _tiles(q_THD, GROUP_ROWS), _tiles(k_THD, blocks.forward_keys), _tiles(v_THD, blocks.forward_keys),
        _tiles(out_THD, GROUP_ROWS), _terms(schedule.key_terms, blocks.forward_keys),
        sinks_H, lse_HT, plan.positions_T, work.work_P, work.offsets_W, *schedule.full, *schedule.partial,
        lse_HT.stride(0), T, num_tiles, scoring.softmax_scale, plan.window,
        GROUP=Hq // k_THD.shape[1], BLOCK_M=GROUP_ROWS, BLOCK_N=blocks.forward_keys, NUM_STAGES=blocks.forward_stages,
        NUM_ROW_STAGES=blocks.forward_row_stages, HAS_SINKS=sinks_H is not None, HAS_WINDOW=plan.window is not None,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def backward(
    dout_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lse2_HT: Tensor, means_HT: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], parts: tuple[Tensor, Tensor], plan: AttentionPlan, scoring: Scoring,
    items: KeySchedule, rows: RowSchedule, blocks: HopperBlocks,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, and the parts of dk and dv of split tiles."""
    T, Hq, D = q_THD.shape
    Hkv = k_THD.shape[1]
    dq_THD, dk_THD, dv_THD = gradients
    num_items, num_tiles = items.tile_I.shape[0], rows.tile_R.shape[0]
    if blocks.is_wide:
        backward_wide_kernel[(2 * num_items * Hkv + num_tiles * Hq,)](
            *(_tiles(x, GROUP_ROWS, D // 2) for x in (q_THD, dout_THD, k_THD, v_THD)),
            *(_tiles(x, blocks.item_rows, D // 2) for x in (q_THD, dout_THD)),
            *(_tiles(x, blocks.keys, D // 2) for x in (q_THD, dout_THD, k_THD, v_THD)),
            *(_tiles(x, GROUP_ROWS, D // 2) for x in gradients),
            lse2_HT, means_HT, *parts, plan.expiry_T, plan.positions_T,
            items.work_P, items.tile_I, items.slot_I, *items.full, *items.partial,
            rows.tile_R, *rows.full, *rows.partial,
            lse2_HT.stride(0), T, num_items, num_tiles, Hkv, scoring.softmax_scale, plan.window,
            GROUP=Hq // Hkv, ITEM_TILE=blocks.item_rows, ROW_TILE=blocks.keys,
            HAS_WINDOW=plan.window is not None, num_warps=NUM_WARPS,
        )  # fmt: skip
        return
    backward_kernel[(num_items * Hkv + num_tiles * Hq,)](
        *(_tiles(x, blocks.item_rows) for x in (q_THD, dout_THD)),
        *(_tiles(x, GROUP_ROWS) for x in (k_THD, v_THD, dk_THD, dv_THD)),
        *(_terms(x, blocks.item_rows) for x in (lse2_HT, means_HT)),
        *(_tiles(x, blocks.keys) for x in (k_THD, v_THD)), _tiles(dq_THD, GROUP_ROWS),
        _terms(rows.key_terms, blocks.keys),
        lse2_HT, means_HT, *parts, plan.expiry_T, plan.positions_T,
        items.work_P, items.tile_I, items.slot_I, *items.full, *items.partial,
        rows.tile_R, *rows.full, *rows.partial,
        lse2_HT.stride(0), T, num_items, num_tiles, Hkv, scoring.softmax_scale, plan.window,
        GROUP=Hq // Hkv, D=D, BLOCK_M=blocks.item_rows, ITEM_N=GROUP_ROWS, BLOCK_N=blocks.keys,
        ITEM_STAGES=blocks.item_stages, KEY_STAGES=blocks.key_stages, VALUE_STAGES=blocks.value_stages,
        BY_ROLE=blocks.items_by_role, HAS_WINDOW=plan.window is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


def backward_adding(
    dout_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, lse2_HT: Tensor, means_HT: Tensor,
    sums_RHMD: Tensor, dk_THD: Tensor, dv_THD: Tensor, parts: tuple[Tensor, Tensor],
    plan: AttentionPlan, scoring: Scoring, items: KeySchedule, item_rows: int, item_stages: int, lag: int,
) -> None:  # fmt: skip
    """Adds dq, before its scale, to the sums [tiles, Hq, M, D]; writes dk and dv, and the parts of split tiles."""
    T, Hq, D = q_THD.shape
    Hkv = k_THD.shape[1]
    adding_kernel[(items.work_P.shape[0],)](
        *(_tiles(x, item_rows) for x in (q_THD, dout_THD)),
        *(_tiles(x, GROUP_ROWS) for x in (k_THD, v_THD, dk_THD, dv_THD)),
        _sums(sums_RHMD), *(_terms(x, item_rows) for x in (lse2_HT, means_HT)),
        *parts, plan.expiry_T, plan.positions_T, items.work_P, items.tile_I, items.slot_I,
        *items.full, *items.partial, T, Hkv, scoring.softmax_scale, plan.window,
        GROUP=Hq // Hkv, D=D, BLOCK_M=item_rows, BLOCK_N=GROUP_ROWS, NUM_STAGES=item_stages, LAG=lag,
        HAS_WINDOW=plan.window is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


def _tiles(tensor_THD: Tensor, num_rows: int, num_columns: int | None = None) -> TensorDescriptor:
    """Tiles of `num_rows` rows of one head, padded or some columns; what lies outside the tensor reads as zeros."""
    aligned_THD = aligned(tensor_THD)
    block = (num_rows, 1, num_columns or padded_head_dim(tensor_THD.shape[2]))
    layout = _tile_layout(block)
    return TensorDescriptor(aligned_THD, list(tensor_THD.shape), list(aligned_THD.stride()), list(block), layout)


@cache
def _tile_layout(block: tuple[int, int, int]) -> gl.NVMMASharedLayout:
    """Kept: working it out takes longer than all else of a descriptor, and a launch makes a dozen."""
    return cast("gl.NVMMASharedLayout", gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16))


def _terms(terms: Tensor, num_columns: int) -> TensorDescriptor:
    """32-bit numbers of rows ([H, T]) or of keys ([2, keys]), some columns of one line."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(terms, list(terms.shape), list(terms.stride()), [1, num_columns], layout)


def _sums(sums_RHMD: Tensor) -> TensorDescriptor:
    """Halves of tiles, each in rows of 128 bytes."""
    block = [2 * GROUP_ROWS, GROUP_ROWS // 2]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    rows = sums_RHMD.view(-1, block[1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block, layout)
