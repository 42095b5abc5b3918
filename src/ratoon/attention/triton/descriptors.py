"""Tensors as the copy engine wants them: aligned addresses, zeros outside."""

# Shape letters: T rows, H heads, D head dim.

import torch
from torch import Tensor
from torch.nn import functional

from ratoon.attention.alignment import ALIGNMENT_BYTES, is_aligned, round_up

MIN_HEAD_DIM = 16
"""The least side of a matrix product."""


def padded_head_dim(head_dim: int) -> int:
    """Blocks have powers of two; zeros fill them."""
    return max(1 << (head_dim - 1).bit_length(), MIN_HEAD_DIM)


def aligned(tensor_THD: Tensor) -> Tensor:
    """The tensor, or a copy where its addresses are not aligned (odd head dims, odd offsets); [T, H, D or more]."""
    if is_aligned(tensor_THD):
        return tensor_THD
    multiple = ALIGNMENT_BYTES // tensor_THD.element_size()
    padded_THD = functional.pad(tensor_THD, (0, -tensor_THD.shape[2] % multiple))
    # A dim of size 1 may have any stride and be contiguous still; a copy in that format has its own.
    return padded_THD if is_aligned(padded_THD) else padded_THD.clone(memory_format=torch.contiguous_format)


def empty_aligned(num_rows: int, num_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """[T, H, D] of `like`'s dtype whose heads start at aligned addresses."""
    multiple = ALIGNMENT_BYTES // like.element_size()
    return like.new_empty(num_rows, num_heads, round_up(head_dim, multiple))[..., :head_dim]


def empty_row_terms(num_heads: int, num_rows: int, like: Tensor) -> Tensor:
    """[H, T] fp32 whose heads start at aligned addresses."""
    multiple = ALIGNMENT_BYTES // 4
    return like.new_empty(num_heads, round_up(num_rows, multiple), dtype=torch.float32)[:, :num_rows]
