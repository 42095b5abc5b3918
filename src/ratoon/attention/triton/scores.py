"""What both kernels do to scores and indices."""

# Shape letters: M rows of a tile, N keys of a tile, K what a product sums over.

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def wide(index):
    """A scalar as int64: row * stride passes 2**31 once T * H * D does. The interpreter counts loops in Python ints."""
    return tl.full([], index, tl.int64)


@triton.jit
def load_tile(desc, first_row, head, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """[M, D] of a [T, H, D] tensor, zeros outside it: the descriptor needs no masks."""
    return desc.load([first_row, head, 0]).reshape([BLOCK_M, BLOCK_D])


@triton.jit
def store_tile(desc, first_row, head, tile, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """[M, D] in the tensor's dtype; what lies outside the tensor is dropped."""
    desc.store([first_row, head, 0], tile.to(desc.dtype).reshape([BLOCK_M, 1, BLOCK_D]))


def needs_upcast(tensor: Tensor) -> bool:
    """Of `dot`: the interpreter multiplies the bit patterns of bf16 numbers."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


@triton.jit
def dot(a, b, UPCAST: tl.constexpr, acc=None):
    """a [M, K] times b [K, N], plus acc; fp32. Float32 inputs are multiplied as such, not as TF32.

    UPCAST: multiply in fp32, for an interpreter that cannot multiply bf16.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def cap_scores(scores, softcap):
    """softcap * tanh(scores / softcap), from exp2, without overflow and without cancellation."""
    ratio = scores / softcap
    size = tl.abs(ratio)
    # tanh(x) = (1 - e) / (1 + e) with e = exp(-2x): its underflow to 0 gives 1.
    shrunk = tl.exp2(size * (-2.0 * LOG2E))
    capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
    # Near 0 the difference would lose what the ratio has: four terms of the series are exact to 2^-24 up to 0.125.
    square = ratio * ratio
    series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0)))
    return tl.where(size < 0.125, scores * series, tl.where(scores < 0.0, -capped, capped))


@triton.jit
def is_read(rows, keys, expiry, row_positions, key_positions, window, HAS_WINDOW: tl.constexpr):
    """The rule: a row reads a key from the key's own row to its expiry, inside the window. Shapes broadcast.

    One comparison: as an unsigned number, a row before its key is larger than any expiry. A key behind the
    last row has expiry 0 and is never read; a row behind the last row reads nothing.
    """
    lifetime = tl.maximum(expiry - keys, 0)
    allowed = (rows - keys).to(tl.uint32) < lifetime.to(tl.uint32)
    if HAS_WINDOW:
        allowed = allowed & (row_positions - key_positions < window)
    return allowed
