"""Tensors as the copy engine wants them: aligned addresses, zeros outside."""

# Shape letters: T rows, H heads, D head dim.

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT_BYTES = 16
"""Of a descriptor's address and strides."""


MIN_HEAD_DIM = 16
"""The least side of a matrix product."""


def padded_head_dim(head_dim: int) -> int:
    """Blocks have powers of two; zeros fill them."""
    return max(1 << (head_dim - 1).bit_length(), MIN_HEAD_DIM)


def aligned(tensor_THD: Tensor) -> Tensor:
    """The tensor, or a copy where its addresses are not aligned (odd head dims, odd offsets); [T, H, D or more]."""
    multiple = ALIGNMENT_BYTES // tensor_THD.element_size()
    *strides, last = tensor_THD.stride()
    if last == 1 and not any(s % multiple for s in strides) and tensor_THD.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor_THD
    return functional.pad(tensor_THD, (0, -tensor_THD.shape[2] % multiple)).contiguous()


def empty_aligned(num_rows: int, num_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """[T, H, D] of `like`'s dtype whose heads start at aligned addresses."""
    multiple = ALIGNMENT_BYTES // like.element_size()
    return like.new_empty(num_rows, num_heads, -(-head_dim // multiple) * multiple)[..., :head_dim]


def empty_row_terms(num_heads: int, num_rows: int, like: Tensor) -> Tensor:
    """[H, T] fp32 whose heads start at aligned addresses."""
    multiple = ALIGNMENT_BYTES // 4
    return like.new_empty(num_heads, -(-num_rows // multiple) * multiple, dtype=torch.float32)[:, :num_rows]
