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

CUDA_TILE_BYTES = 256 * MIB
CUDA_TILE_ROWS = 4096
"""On a GPU a tile pays for a dozen kernel launches, so it is larger. Beyond this size an H200 gains 5 %."""

CPU_WEIGHT_TILE_BYTES = 32 * MIB
CUDA_WEIGHT_TILE_BYTES = 256 * MIB
"""The widened (fp32) copy of a [v, C] piece of the weight or of its gradient, where the weight is bf16 or fp16."""

MIN_TILE_COLUMNS = 128


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
        rows = max(1, min(M, CUDA_TILE_ROWS if on_cuda else CPU_TILE_ROWS))
        itemsize = accumulate_dtype.itemsize
        columns = (CUDA_TILE_BYTES if on_cuda else CPU_TILE_BYTES) // (itemsize * rows)
        if not on_cuda:
            columns = min(columns, CPU_TILE_COLUMNS)
        if weight_VC.dtype != accumulate_dtype:
            weight_tile_bytes = CUDA_WEIGHT_TILE_BYTES if on_cuda else CPU_WEIGHT_TILE_BYTES
            columns = min(columns, weight_tile_bytes // (itemsize * max(1, C)))
        return cls(num_rows=M, num_columns=V, rows=rows, columns=min(V, max(MIN_TILE_COLUMNS, columns)))

    @property
    def numel(self) -> int:
        """Elements of the largest tile."""
        return self.rows * self.columns

    def row_ranges(self) -> Iterator[Range]:
        """Half-open [start, end) pieces of M."""
        for start in range(0, self.num_rows, self.rows):
            yield start, min(start + self.rows, self.num_rows)

    def column_ranges(self) -> Iterator[Range]:
        """Half-open [start, end) pieces of V."""
        for start in range(0, self.num_columns, self.columns):
            yield start, min(start + self.columns, self.num_columns)
