"""Bytes that the output head's log-probs need in backward, where the most of them are alive.

`ratoon.ops.logprob` makes logits a tile at a time; the numbers here are its `tiling`'s (a test compares them).
"""

# Shape letters: T rows, M scored tokens, C channels, V vocabulary.

from ratoon.planner.memory_sizes import MIB, MicrobatchSize
from ratoon.types.model_shape import ModelShape

_CPU_TILE_BYTES = 8 * MIB
_CPU_TILE_ROWS = 512
_CPU_TILE_COLUMNS = 4096
_CUDA_TILE_BYTES = 264 * MIB
_CUDA_TILE_ROWS = 8_192
_CPU_WEIGHT_TILE_BYTES = 32 * MIB
_CUDA_WEIGHT_TILE_BYTES = 256 * MIB


def tile_sides(
    num_scored: int, vocab_size: int, hidden_size: int, dtype_bytes: int, *, on_cuda: bool
) -> tuple[int, int]:
    """Rows and columns that no tile exceeds."""
    sum_bytes = max(dtype_bytes, 4)
    rows = max(1, min(num_scored, _CUDA_TILE_ROWS if on_cuda else _CPU_TILE_ROWS))
    columns = (_CUDA_TILE_BYTES if on_cuda else _CPU_TILE_BYTES) // (sum_bytes * rows)
    if not on_cuda:
        columns = min(columns, _CPU_TILE_COLUMNS)
    if dtype_bytes != sum_bytes:
        weight_bytes = _CUDA_WEIGHT_TILE_BYTES if on_cuda else _CPU_WEIGHT_TILE_BYTES
        columns = min(columns, weight_bytes // (sum_bytes * hidden_size))
    return rows, min(vocab_size, max(columns, 128))


def head_scratch_bytes(
    shape: ModelShape, microbatch: MicrobatchSize, dtype_bytes: int, *, is_trained: bool, on_cuda: bool
) -> int:
    """The most at a time, the gradient of the head's weight included where it `is_trained`.

    One moment of three: while tiles are made; when the hidden states' gradient is rounded to their dtype; when that is
    spread over all rows.
    """
    T, M, C, V, b = (
        microbatch.num_rows, microbatch.num_scored, shape.hidden_size, shape.vocab_size, dtype_bytes,
    )  # fmt: skip
    sum_bytes = max(b, 4)
    rows, columns = tile_sides(M, V, C, b, on_cuda=on_cuda)
    tile = rows * -(-columns // 32) * 32
    if on_cuda:  # the logits, and their gradient in the dtype of products
        tiles = tile * (sum_bytes + (b if b < 4 else 0))
    else:  # the softmax beside its logarithm, and 16-bit operands widened
        tiles = tile * 2 * sum_bytes + (sum_bytes * (columns * C + M * C) if b < 4 else 0)
    weight_grad = b * V * C if is_trained else 0
    widened_grad = sum_bytes * columns * C if is_trained and b < 4 else 0
    return weight_grad + max(
        tiles + sum_bytes * M * C + widened_grad,
        (sum_bytes + b) * M * C,
        b * (M + T) * C,
    )
