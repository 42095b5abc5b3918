"""A backward kernel for Hopper that adds dQ up in no fixed order: five matrix products where `attention.py` has seven.

It owns keys, as the items of the deterministic kernel do, and adds what they give each tile of rows to fp32 sums in
global memory, which one pass then scales and rounds.
"""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false, reportIndexIssue=false

# Shape letters: T rows, R tiles of rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim (equal),
# M rows of a tile.

from dataclasses import dataclass
from importlib import import_module

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton.attention import add_parts, row_terms
from ratoon.attention.triton.attention import forward as forward  # a kernel's home has both passes
from ratoon.attention.triton.descriptors import empty_aligned, padded_head_dim
from ratoon.attention.triton.machine import machine_of
from ratoon.attention.triton.schedule import build_key_schedule
from ratoon.attention.triton.scores import wide
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT

ITEM_KEYS = 128
"""Keys of a program."""

FINISH_WARPS = 8
"""Enough threads to hold a tile's sums."""


@dataclass(frozen=True, slots=True)
class AddingBlocks:
    rows: int
    """Of a visiting tile. With the head dim it makes 8,192 numbers: two squares of 64."""

    stages: int
    """Visiting tiles that shared memory holds at once."""

    lag: int
    """Tiles between a tile's score gradients and their product with keys, 1 or 2: as far as the groups may drift apart.

    Shared memory holds twice as many tiles' score gradients.
    """


ADDING_BLOCKS = {64: AddingBlocks(rows=128, stages=2, lag=1), 128: AddingBlocks(rows=64, stages=2, lag=2)}
"""By head dim, padded, of queries, keys and values alike."""


def backward(
    dout_THE: Tensor, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, out_THE: Tensor, lse_HT: Tensor,
    plan: AttentionPlan, scoring: Scoring, *, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A `BackwardKernel` for equal head dims that pad to one of `ADDING_BLOCKS`, bf16 and fp16, on Hopper GPUs."""
    T, Hq, D = q_THD.shape
    Hkv, block_D = k_THD.shape[1], padded_head_dim(D)
    assert not deterministic, "the order in which dQ is added differs from run to run; the caller knows who can do it"
    assert scoring.softcap is None, "scores are not capped here; the caller knows who caps them"
    assert v_THE.shape[2] == D and block_D in ADDING_BLOCKS, (
        f"head dims {D} and {v_THE.shape[2]}: not equal, or no tile"
    )
    assert q_THD.element_size() == 2, f"q is {q_THD.dtype}, and the products here are of 16 bits"
    blocks = ADDING_BLOCKS[block_D]
    num_workers = machine_of(plan.device).num_multiprocessors
    items = plan.schedule(build_key_schedule, blocks.rows, ITEM_KEYS, num_workers, Hkv)
    lse2_HT, means_HT = row_terms(out_THE, dout_THE, lse_HT)
    dq_THD, dk_THD, dv_THE = (empty_aligned(T, heads, D, q_THD) for heads in (Hq, Hkv, Hkv))
    num_tiles = -(-T // blocks.rows)
    sums_RHMD = q_THD.new_zeros(num_tiles, Hq, blocks.rows, block_D, dtype=torch.float32)
    dk_parts, dv_parts = (q_THD.new_empty(items.num_slots, Hkv, ITEM_KEYS, D, dtype=torch.float32) for _ in range(2))
    launches = import_module("ratoon.attention.triton.hopper.launch")
    launches.backward_adding(
        dout_THE, q_THD, k_THD, v_THE, lse2_HT, means_HT, sums_RHMD, dk_THD, dv_THE, (dk_parts, dv_parts),
        plan, scoring, items, blocks.rows, blocks.stages, blocks.lag,
    )  # fmt: skip
    finish_kernel[(num_tiles, Hq)](
        sums_RHMD, dq_THD, *dq_THD.stride()[:2], T, Hq, scoring.softmax_scale,
        D=D, BLOCK_M=blocks.rows, BLOCK_D=block_D, num_warps=FINISH_WARPS,
    )  # fmt: skip
    add_parts((dk_parts, dv_parts), (dk_THD, dv_THE), items, ITEM_KEYS)
    return dq_THD, dk_THD, dv_THE


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def finish_kernel(
    sums_ptr, dq_ptr, stride_qt, stride_qh, T, num_heads, softmax_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of one head, from its sums in the order that `add_half` gives them: two halves of [64, 64]."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = (wide(tile) * num_heads + head) * (BLOCK_M * BLOCK_D)
    sums = tl.load(sums_ptr + first + tl.arange(0, BLOCK_M * BLOCK_D))
    # Halves, eights of columns, warps, rows of 8, pairs of columns, rows 8 apart, columns of a pair.
    sums = tl.reshape(sums, [2, 8, 4, 8, 4, 2, 2])
    # The halves are of columns or of rows.
    sums = tl.permute(sums, [2, 5, 3, 0, 1, 4, 6] if BLOCK_D == 128 else [0, 2, 5, 3, 1, 4, 6])
    dq = tl.reshape(sums, [BLOCK_M, BLOCK_D]) * softmax_scale
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    dq_ptrs = dq_ptr + rows.to(tl.int64)[:, None] * stride_qt + head * stride_qh + offs_d[None, :]
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=(rows < T)[:, None] & (offs_d < D)[None, :])
