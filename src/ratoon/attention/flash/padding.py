"""Rows as stock kernels want them: head dims that they know, vectors that start where wide loads may."""

# Shape letters: T rows, H heads, D head dim.

import torch
from torch import Tensor
from torch.nn import functional

from ratoon.attention.alignment import is_aligned


def pad_head_dim(tensor_THD: Tensor, head_dim: int) -> Tensor:
    """[T, H, head_dim], zeros at the end of each vector, which change no score and no value."""
    missing = head_dim - tensor_THD.shape[2]
    assert missing >= 0, f"head dim {tensor_THD.shape[2]} does not fit in {head_dim}"
    return functional.pad(tensor_THD, (0, missing)) if missing else tensor_THD


def kernel_ready(tensor_THD: Tensor, head_dim: int) -> Tensor:
    """As `pad_head_dim`, and every vector aligned; the tensor itself where nothing is to be done."""
    padded_THD = pad_head_dim(tensor_THD, head_dim)
    return padded_THD if is_aligned(padded_THD) else padded_THD.clone(memory_format=torch.contiguous_format)


def cut(tensor_THD: Tensor, head_dim: int) -> Tensor:
    """The first numbers of each vector: what `kernel_ready` got."""
    return tensor_THD if tensor_THD.shape[2] == head_dim else tensor_THD[..., :head_dim]
