"""Which of our kernels serve a call, and what a backward pass does around its launch."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from importlib import import_module
from types import ModuleType

import torch
import triton
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton import portable
from ratoon.attention.triton.backward import add_parts_kernel, row_terms_kernel
from ratoon.attention.triton.blocks import HOPPER_BLOCKS, Blocks, HopperBlocks, choose_blocks
from ratoon.attention.triton.descriptors import empty_aligned, empty_row_terms, padded_head_dim
from ratoon.attention.triton.machine import machine_of
from ratoon.attention.triton.schedule import KeySchedule, build_key_schedule, build_row_schedule

TERMS_ROWS = 64
"""Rows of one head whose terms one program takes."""

TERMS_WARPS = 8
"""So many that at a head dim of 128 a thread needs 32 registers: as many programs run as a multiprocessor takes."""


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """A `ForwardKernel`."""
    launches, blocks = _choose(q_THD, v_THE, plan, scoring)
    schedule = plan.schedule(build_row_schedule, blocks.forward_rows, blocks.forward_keys)
    out_THE = empty_aligned(*q_THD.shape[:2], v_THE.shape[2], q_THD)
    lse_HT = q_THD.new_empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.float32)
    launches.forward(q_THD, k_THD, v_THE, sinks_H, out_THE, lse_HT, plan, scoring, schedule, blocks)
    return out_THE, lse_HT


def backward(
    dout_THE: Tensor, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, out_THE: Tensor, lse_HT: Tensor,
    plan: AttentionPlan, scoring: Scoring, *, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A `BackwardKernel`, always deterministic: every gradient is summed by one program, in one order."""
    del deterministic
    T, Hq, D = q_THD.shape
    Hkv, E = v_THE.shape[1:]
    launches, blocks = _choose(q_THD, v_THE, plan, scoring)
    num_workers = machine_of(plan.device).num_multiprocessors
    items = plan.schedule(build_key_schedule, blocks.item_rows, blocks.item_keys, num_workers, Hkv)
    rows = plan.schedule(build_row_schedule, blocks.rows, blocks.keys)
    lse2_HT, means_HT = row_terms(out_THE, dout_THE, lse_HT)
    gradients = tuple(empty_aligned(T, heads, dim, q_THD) for heads, dim in ((Hq, D), (Hkv, D), (Hkv, E)))
    parts = tuple(q_THD.new_empty(items.num_slots, Hkv, blocks.item_keys, dim, dtype=torch.float32) for dim in (D, E))
    launches.backward(
        dout_THE, q_THD, k_THD, v_THE, lse2_HT, means_HT, gradients, parts, plan, scoring, items, rows, blocks
    )
    dq_THD, dk_THD, dv_THE = gradients
    add_parts(parts, (dk_THD, dv_THE), items, blocks.item_keys)
    return dq_THD, dk_THD, dv_THE


def _choose(
    q_THD: Tensor, v_THE: Tensor, plan: AttentionPlan, scoring: Scoring
) -> tuple[ModuleType, Blocks | HopperBlocks]:
    """The module with the launches, and its tiles."""
    machine, D, E = machine_of(plan.device), q_THD.shape[2], v_THE.shape[2]
    block_D = padded_head_dim(D)
    is_for_hopper = machine.is_hopper and q_THD.element_size() == 2 and D == E and scoring.softcap is None
    # The wide kernels, of head dim 512, halve it.
    if is_for_hopper and block_D in HOPPER_BLOCKS and (block_D == D or not HOPPER_BLOCKS[block_D].is_wide):
        return import_module("ratoon.attention.triton.hopper.launch"), HOPPER_BLOCKS[block_D]
    head_bytes = max(padded_head_dim(D), padded_head_dim(E)) * q_THD.element_size()
    return portable, choose_blocks(head_bytes, q_THD.element_size(), machine.shared_memory_bytes)


def add_parts(parts: tuple[Tensor, ...], gradients: tuple[Tensor, ...], items: KeySchedule, item_keys: int) -> None:
    """Writes dk and dv of the tiles that the schedule splits."""
    num_split = items.split_tile_X.shape[0]
    for part, grad in zip(parts, gradients, strict=True) if num_split else ():
        T, Hkv, D = grad.shape
        add_parts_kernel[(num_split, Hkv)](
            part, grad, items.split_tile_X, items.split_slots, *grad.stride()[:2], T, Hkv,
            D=D, BLOCK_D=padded_head_dim(D), BLOCK_N=item_keys,
        )  # fmt: skip


def row_terms(out_THE: Tensor, dout_THE: Tensor, lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """[Hq, T] fp32: log-sum-exps in base 2, and out . dout."""
    T, Hq, E = out_THE.shape
    lse2_HT, means_HT = (empty_row_terms(Hq, T, lse_HT) for _ in range(2))
    row_terms_kernel[(triton.cdiv(T, TERMS_ROWS) * Hq,)](
        out_THE, dout_THE, lse_HT, lse2_HT, means_HT,
        *out_THE.stride()[:2], *dout_THE.stride()[:2], lse_HT.stride(0), lse2_HT.stride(0),
        T, Hq, E=E, BLOCK_E=padded_head_dim(E), BLOCK_M=TERMS_ROWS, num_warps=TERMS_WARPS,
    )  # fmt: skip
    return lse2_HT, means_HT
