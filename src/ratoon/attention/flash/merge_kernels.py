"""Triton kernels that join levels: a program has a block of rows of one head, and skips rows that are not marked."""

# Shape letters: T rows, H heads, D head dim, E value head dim.
# pyright: reportArgumentType=false
# Compile-time parameters of a kernel are typed as constexpr, and given as plain numbers.

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT

BLOCK_ROWS = 32


def merge_level(out_THE: Tensor, lse_HT: Tensor, part_THE: Tensor, part_lse_HT: Tensor, reads_T: Tensor) -> None:
    """As `merge.merge_level`."""
    T, H, E = out_THE.shape
    assert out_THE.stride(2) == part_THE.stride(2) == lse_HT.stride(1) == part_lse_HT.stride(1) == 1, (
        "the kernel reads heads' vectors, and rows' log-sum-exps, as they lie"
    )
    merge_level_kernel[(triton.cdiv(T, BLOCK_ROWS), H)](
        *(out_THE, lse_HT, part_THE, part_lse_HT, reads_T.view(torch.uint8)),
        *(out_THE.stride(0), out_THE.stride(1), lse_HT.stride(0)),
        *(part_THE.stride(0), part_THE.stride(1), part_lse_HT.stride(0)),
        *(T, E),
        BLOCK_T=BLOCK_ROWS,
        BLOCK_E=triton.next_power_of_2(E),
    )


def add_level(total_THD: Tensor, part_THD: Tensor, is_added_T: Tensor) -> None:
    """As `merge.add_level`."""
    T, H, D = total_THD.shape
    assert total_THD.stride(2) == part_THD.stride(2) == 1, "the kernel reads heads' vectors as they lie"
    add_level_kernel[(triton.cdiv(T, BLOCK_ROWS), H)](
        *(total_THD, part_THD, is_added_T.view(torch.uint8)),
        *(total_THD.stride(0), total_THD.stride(1), part_THD.stride(0), part_THD.stride(1)),
        *(T, D),
        BLOCK_T=BLOCK_ROWS,
        BLOCK_D=triton.next_power_of_2(D),
    )


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def merge_level_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, reads_ptr,
    stride_ot, stride_oh, stride_lh, stride_pt, stride_ph, stride_plh,
    T, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    # int64: row * stride passes 2**31 once T * H * E does
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    mask_t = tl.load(reads_ptr + offs_t, mask=offs_t < T, other=0) != 0  # [BLOCK_T]
    if tl.max(mask_t.to(tl.int32), axis=0) == 0:
        return
    mask_te = mask_t[:, None] & (offs_e < E)[None, :]

    lse = tl.load(lse_ptr + head * stride_lh + offs_t, mask=mask_t, other=0.0)  # [BLOCK_T]
    part_lse = tl.load(part_lse_ptr + head * stride_plh + offs_t, mask=mask_t, other=0.0)
    high = tl.maximum(lse, part_lse)
    total = high + tl.log(tl.exp(lse - high) + tl.exp(part_lse - high))

    out_ptrs = out_ptr + offs_t[:, None] * stride_ot + head * stride_oh + offs_e[None, :]
    part_ptrs = part_ptr + offs_t[:, None] * stride_pt + head * stride_ph + offs_e[None, :]
    out = tl.load(out_ptrs, mask=mask_te, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_E]
    part = tl.load(part_ptrs, mask=mask_te, other=0.0).to(tl.float32)
    merged = out * tl.exp(lse - total)[:, None] + part * tl.exp(part_lse - total)[:, None]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask_te)
    tl.store(lse_ptr + head * stride_lh + offs_t, total, mask=mask_t)


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def add_level_kernel(
    total_ptr, part_ptr, is_added_ptr,
    stride_tt, stride_th, stride_pt, stride_ph,
    T, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    # int64: row * stride passes 2**31 once T * H * D does
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask_t = tl.load(is_added_ptr + offs_t, mask=offs_t < T, other=0) != 0  # [BLOCK_T]
    if tl.max(mask_t.to(tl.int32), axis=0) == 0:
        return
    mask_td = mask_t[:, None] & (offs_d < D)[None, :]

    total_ptrs = total_ptr + offs_t[:, None] * stride_tt + head * stride_th + offs_d[None, :]
    part_ptrs = part_ptr + offs_t[:, None] * stride_pt + head * stride_ph + offs_d[None, :]
    total = tl.load(total_ptrs, mask=mask_td, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_D]
    part = tl.load(part_ptrs, mask=mask_td, other=0.0).to(tl.float32)
    tl.store(total_ptrs, (total + part).to(total_ptr.dtype.element_ty), mask=mask_td)
