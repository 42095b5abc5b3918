"""Where kernels want vectors to start."""

# Shape letters: T rows, H heads, D head dim.

from torch import Tensor

ALIGNMENT_BYTES = 16
"""Kernels and the copy engine take this many bytes at a time, and do not check."""


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def is_aligned(tensor_THD: Tensor) -> bool:
    """Every vector starts at a multiple of `ALIGNMENT_BYTES`, and is contiguous.

    No broadcast dim either: some kernels are compiled anew for each.
    """
    size = tensor_THD.element_size()
    row_bytes, head_bytes = tensor_THD.stride(0) * size, tensor_THD.stride(1) * size
    return (
        tensor_THD.stride(2) == 1
        and 0 not in (row_bytes, head_bytes)
        and (tensor_THD.data_ptr() | row_bytes | head_bytes) % ALIGNMENT_BYTES == 0
    )
