"""How large a piece of the [M, V] logits exists at a time."""

# Shape letters: M scored tokens, C channels, V vocabulary; m, v: one tile of them.

from collections.abc import Iterator
from dataclasses import dataclass

import torch

Range = tuple[int, int]
"""Half-open [start, end)."""

MIB = 1 << 20

CPU_TILE_BYTES = 8 * MIB
"""One tile of logits; at most three live at a time. Elementwise passes then run in the outer caches, and each matrix
product is still large enough for packing and thread barriers not to count. 4 to 8 MiB measured best on two cores."""

CPU_TILE_ROWS = 512
CPU_TILE_COLUMNS = 4096
"""Neither side of a tile is longer, so that few rows do not make it so wide that the weight leaves the caches between
the two products of backward that read it."""

CUDA_TILE_BYTES = 264 * MIB
CUDA_TILE_ROWS = 8_192
"""On a GPU a tile pays for launches and for one reading and writing of the sums in fp32: hidden's gradient once a tile,
the weight's once for each tile but the first in a column of tiles. But products of wide tiles are faster: on an H200
with 264 MiB whole updates took 2 % less with 8,192 x 8,448 than with 16,384 x 4,224."""

CUDA_COLUMNS_PER_PROCESSOR = 32
"""Columns come in multiples of this times the GPU's multiprocessors: a matrix product's blocks, up to 128 x 256, then
fill all of them equally often where rows or channels are a multiple of 1,024."""

CUDA_ROW_BYTES = 64
"""A row of a tile starts at a multiple of it, so that kernels and matrix products load 16 bytes at a time."""

CPU_WEIGHT_TILE_BYTES = 32 * MIB
CUDA_WEIGHT_TILE_BYTES = 256 * MIB
"""The widened (fp32) copy of a [v, C] piece of the weight or of its gradient, where the weight is bf16 or fp16."""

MIN_TILE_COLUMNS = 128
CUDA_MIN_STEP = 128
"""Rows and columns of smaller tiles on CUDA are multiples of it."""


def padded(columns: int) -> int:
    """The elements from one row of a tile to the next that keep rows of 4 bytes, and of 2, aligned."""
    per_row = CUDA_ROW_BYTES // 2
    return -(-columns // per_row) * per_row


def even_piece(total: int, most: int, step: int) -> int:
    """The size of equal pieces of at most `most`, a multiple of step, or of `CUDA_MIN_STEP` where step is too large."""
    if total <= most:
        return max(1, total)
    step = next(size for size in (step, CUDA_MIN_STEP, 1) if size <= most)
    most -= most % step
    num_pieces = -(-total // most)
    return min(most, -(-total // (num_pieces * step)) * step)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Cuts [M, V] into tiles of at most `rows` x `columns`."""

    num_rows: int
    num_columns: int
    rows: int
    columns: int

    @classmethod
    def choose(cls, hidden_MC: torch.Tensor, weight_VC: torch.Tensor, accumulate_dtype: torch.dtype) -> "Tiling":
        """Tiles of `accumulate_dtype` within the byte budgets above."""
        M, C = hidden_MC.shape
        V = weight_VC.shape[0]
        on_cuda = hidden_MC.device.type == "cuda"
        rows = even_piece(M, CUDA_TILE_ROWS, CUDA_MIN_STEP) if on_cuda else max(1, min(M, CPU_TILE_ROWS))
        itemsize = accumulate_dtype.itemsize
        columns = (CUDA_TILE_BYTES if on_cuda else CPU_TILE_BYTES) // (itemsize * rows)
        if not on_cuda:
            columns = min(columns, CPU_TILE_COLUMNS)
        if weight_VC.dtype != accumulate_dtype:
            weight_tile_bytes = CUDA_WEIGHT_TILE_BYTES if on_cuda else CPU_WEIGHT_TILE_BYTES
            columns = min(columns, weight_tile_bytes // (itemsize * max(1, C)))
        columns = max(MIN_TILE_COLUMNS, columns)
        if on_cuda:
            num_processors = torch.cuda.get_device_properties(hidden_MC.device).multi_processor_count
            columns = even_piece(V, columns, CUDA_COLUMNS_PER_PROCESSOR * num_processors)
        return cls(num_rows=M, num_columns=V, rows=rows, columns=min(V, columns))

    @property
    def numel(self) -> int:
        """Elements of the largest tile."""
        return self.rows * self.columns

    @property
    def padded_numel(self) -> int:
        """Elements of the largest tile whose rows are padded to `padded`."""
        return self.rows * padded(self.columns)

    def row_ranges(self) -> Iterator[Range]:
        """Half-open [start, end) pieces of M."""
        for start in range(0, self.num_rows, self.rows):
            yield start, min(start + self.rows, self.num_rows)

    def column_ranges(self) -> Iterator[Range]:
        """Half-open [start, end) pieces of V."""
        for start in range(0, self.num_columns, self.columns):
            yield start, min(start + self.columns, self.num_columns)
