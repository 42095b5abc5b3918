"""The launches: one forward, and backward one, with a short one before it and one behind it where tiles were split."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton.backward import add_parts_kernel, backward_kernel, row_terms_kernel
from ratoon.attention.triton.blocks import MIN_BLOCK, Blocks, choose_blocks
from ratoon.attention.triton.forward import forward_kernel
from ratoon.attention.triton.schedule import DeviceIntervals, build_key_schedule, build_row_schedule

TERMS_ROWS = 64
"""Rows whose terms one program takes: memory-bound, so any size does."""

ALIGNMENT_BYTES = 16
"""Of a descriptor's address and strides."""


class _Machine(NamedTuple):
    num_multiprocessors: int

    shared_memory_bytes: int | None
    """None: the interpreter."""


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """A `ForwardKernel`."""
    T, Hq, D = q_THD.shape
    Hkv, E = v_THE.shape[1:]
    blocks = _blocks(plan, D, E)
    rows, keys = blocks.forward_rows, blocks.forward_keys
    schedule = plan.schedule(build_row_schedule, rows, keys)
    out_THE = _empty(T, Hq, E, q_THD)
    lse_HT = q_THD.new_empty(Hq, T, dtype=torch.float32)
    num_tiles = schedule.tile_R.shape[0]
    forward_kernel[(num_tiles * Hq,)](
        _tiles(q_THD, rows), _tiles(k_THD, keys), _tiles(v_THE, keys), _tiles(out_THE, rows),
        sinks_H, lse_HT, plan.expiry_T, plan.positions_T,
        schedule.tile_R, *_tables(schedule.full), *_tables(schedule.partial),
        lse_HT.stride(0), T, num_tiles, scoring.softmax_scale, scoring.softcap, plan.window,
        GROUP=Hq // Hkv, BLOCK_D=_block(D), BLOCK_E=_block(E), BLOCK_M=rows, BLOCK_N=keys,
        HAS_SINKS=sinks_H is not None, HAS_SOFTCAP=scoring.softcap is not None, HAS_WINDOW=plan.window is not None,
        LOOK_AHEAD=blocks.looks_ahead, UPCAST=_upcast(q_THD),
        num_warps=blocks.forward_warps, num_stages=blocks.forward_stages,
    )  # fmt: skip
    return out_THE, lse_HT


def backward(
    dout_THE: Tensor, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, out_THE: Tensor, lse_HT: Tensor,
    plan: AttentionPlan, scoring: Scoring, *, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A `BackwardKernel`, always deterministic: every gradient is summed by one program, in one order."""
    del deterministic
    T, Hq, D = q_THD.shape
    Hkv, E = v_THE.shape[1:]
    blocks, machine = _blocks(plan, D, E), _machine(plan.device)
    num_workers = max(machine.num_multiprocessors // Hkv, 1)
    items = plan.schedule(build_key_schedule, blocks.item_rows, blocks.item_keys, num_workers)
    rows = plan.schedule(build_row_schedule, blocks.rows, blocks.keys)
    lse2_HT, means_HT = _row_terms(out_THE, dout_THE, lse_HT)
    dq_THD, dk_THD, dv_THE = _empty(T, Hq, D, q_THD), _empty(T, Hkv, D, q_THD), _empty(T, Hkv, E, q_THD)
    dk_parts, dv_parts = (
        q_THD.new_empty(items.num_slots, Hkv, blocks.item_keys, dim, dtype=torch.float32) for dim in (D, E)
    )
    num_items, num_tiles = items.tile_I.shape[0], rows.tile_R.shape[0]

    backward_kernel[(num_items * Hkv + num_tiles * Hq,)](
        *(_tiles(x, blocks.item_rows) for x in (q_THD, dout_THE)),
        *(_tiles(x, blocks.item_keys) for x in (k_THD, v_THE, dk_THD, dv_THE)),
        *(_tiles(x, blocks.rows) for x in (q_THD, dout_THE)), *(_tiles(x, blocks.keys) for x in (k_THD, v_THE)),
        _tiles(dq_THD, blocks.rows),
        lse2_HT, means_HT, dk_parts, dv_parts, plan.expiry_T, plan.positions_T,
        items.tile_I, items.slot_I, *_tables(items.full), *_tables(items.partial),
        rows.tile_R, *_tables(rows.full), *_tables(rows.partial),
        lse2_HT.stride(0), T, num_items, num_tiles, Hkv, scoring.softmax_scale, scoring.softcap, plan.window,
        GROUP=Hq // Hkv, D=D, E=E, BLOCK_D=_block(D), BLOCK_E=_block(E),
        ITEM_M=blocks.item_rows, ITEM_N=blocks.item_keys, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys,
        HAS_SOFTCAP=scoring.softcap is not None, HAS_WINDOW=plan.window is not None, UPCAST=_upcast(q_THD),
        num_warps=blocks.backward_warps, num_stages=blocks.backward_stages,
    )  # fmt: skip
    num_split = items.split_tile_X.shape[0]
    for parts, grad in ((dk_parts, dk_THD), (dv_parts, dv_THE)) if num_split else ():
        add_parts_kernel[(num_split, Hkv)](
            parts, grad, items.split_tile_X, items.split_slots, *grad.stride()[:2], T, Hkv,
            D=grad.shape[2], BLOCK_D=_block(grad.shape[2]), BLOCK_N=blocks.item_keys,
        )  # fmt: skip
    return dq_THD, dk_THD, dv_THE


def _row_terms(out_THE: Tensor, dout_THE: Tensor, lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """[Hq, T] fp32: log-sum-exps in base 2, and out . dout."""
    T, Hq, E = out_THE.shape
    lse2_HT, means_HT = torch.empty_like(lse_HT), torch.empty_like(lse_HT)
    row_terms_kernel[(triton.cdiv(T, TERMS_ROWS), Hq)](
        out_THE, dout_THE, lse_HT, lse2_HT, means_HT,
        *out_THE.stride()[:2], *dout_THE.stride()[:2], lse_HT.stride(0),
        T, E=E, BLOCK_E=_block(E), BLOCK_M=TERMS_ROWS,
    )  # fmt: skip
    return lse2_HT, means_HT


def _tiles(tensor_THD: Tensor, num_rows: int) -> TensorDescriptor:
    """Tiles of `num_rows` rows of one head; what lies outside the tensor reads as zeros.

    A copy is read where addresses are not aligned (odd head dims).
    """
    aligned_THD = _aligned(tensor_THD)
    return TensorDescriptor(
        aligned_THD, list(tensor_THD.shape), list(aligned_THD.stride()), [num_rows, 1, _block(tensor_THD.shape[2])]
    )


def _aligned(tensor_THD: Tensor) -> Tensor:
    multiple = ALIGNMENT_BYTES // tensor_THD.element_size()
    *strides, last = tensor_THD.stride()
    if last == 1 and not any(s % multiple for s in strides) and tensor_THD.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor_THD
    return functional.pad(tensor_THD, (0, -tensor_THD.shape[2] % multiple)).contiguous()


def _empty(num_rows: int, num_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """[T, H, D] whose heads start at aligned addresses."""
    multiple = ALIGNMENT_BYTES // like.element_size()
    return like.new_empty(num_rows, num_heads, -(-head_dim // multiple) * multiple)[..., :head_dim]


def _tables(intervals: DeviceIntervals) -> tuple[Tensor, Tensor, Tensor]:
    return intervals.offsets, intervals.start_J, intervals.end_J


def _block(head_dim: int) -> int:
    """Padded by zeros."""
    return max(1 << (head_dim - 1).bit_length(), MIN_BLOCK)


def _blocks(plan: AttentionPlan, head_dim: int, v_head_dim: int) -> Blocks:
    return choose_blocks(max(_block(head_dim), _block(v_head_dim)), _machine(plan.device).shared_memory_bytes)


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> _Machine:
    if device.type == "cpu":
        return _Machine(num_multiprocessors=8, shared_memory_bytes=None)
    properties = torch.cuda.get_device_properties(device)
    return _Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def _upcast(tensor: Tensor) -> bool:
    """The interpreter multiplies the bit patterns of bf16 numbers."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
