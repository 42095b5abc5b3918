"""Which tokens each scored token was drawn among, as the operations read them."""

# Shape letters: M scored tokens, V vocabulary, J kept pairs, S segments of pairs; j, s: of one piece; m, v: one tile.

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.ops.logprob.tiling import Range
from ratoon.types import SampledSupport


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive pairs, and the segments that they belong to."""

    pairs: slice
    segments: slice

    offsets: NDArray[np.int32]
    """[s + 1]. Where each segment's pairs begin and end, counted from the piece's first."""

    is_cut: bool
    """The last segment goes on in the next piece."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of consecutive pairs, none empty, that are added up together."""

    offsets: NDArray[np.int64]
    """[S + 1], on the host: loops over pieces then wait for no device."""

    @property
    def num_pairs(self) -> int:
        return int(self.offsets[-1])

    def lengths(self, device: torch.device) -> Tensor:
        """[S] int64."""
        return torch.from_numpy(np.diff(self.offsets)).to(device)

    def pieces(self, most_pairs: int) -> Iterator[Piece]:
        """Every pair once, in order; a segment may lie in several."""
        for start in range(0, self.num_pairs, most_pairs):
            end = min(start + most_pairs, self.num_pairs)
            first = int(np.searchsorted(self.offsets, start, side="right")) - 1
            last = int(np.searchsorted(self.offsets, end, side="left"))
            inside = np.clip(self.offsets[first : last + 1], start, end) - start
            yield Piece(slice(start, end), slice(first, last), inside.astype(np.int32), end < self.offsets[last])

    def sums(self, values_J: Tensor) -> Tensor:
        """[S], each segment's values added up in order."""
        return torch.segment_reduce(values_J, "sum", lengths=self.lengths(values_J.device), unsafe=True)

    def maxima(self, values_J: Tensor) -> Tensor:
        """[S]; NaN where a segment holds one."""
        return torch.segment_reduce(values_J, "max", lengths=self.lengths(values_J.device), unsafe=True)


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The pairs of a scored token and one of its kept tokens, in the order of the scored tokens."""

    rows: Segments
    """Each scored token's pairs."""

    row_J: Tensor
    """[J] int32."""

    token_J: Tensor
    """[J] int32."""

    @classmethod
    def build(cls, support: SampledSupport, device: torch.device) -> "KeptSets":
        rows = Segments(support.offsets)
        row_M = torch.arange(support.num_tokens, dtype=torch.int32, device=device)
        return cls(
            rows=rows,
            row_J=torch.repeat_interleave(row_M, rows.lengths(device), output_size=rows.num_pairs),
            token_J=torch.tensor(support.token_ids, device=device),
        )

    def are_targets(self, target_M: Tensor) -> Tensor:
        """[J] bool: at most one pair of each scored token is its target."""
        return self.token_J == target_M.index_select(0, self.row_J)


@dataclass(frozen=True, slots=True)
class KeptTiles:
    """The same sets, read a tile of [M, V] at a time."""

    sets: KeptSets
    num_columns: int
    """V."""

    key_J: NDArray[np.int64]
    """[J], on the host, rising: row * V + token."""

    @classmethod
    def build(cls, sets: KeptSets, support: SampledSupport, num_columns: int) -> "KeptTiles":
        row_J = np.repeat(np.arange(support.num_tokens) * num_columns, np.diff(support.offsets))
        return cls(sets, num_columns, row_J + support.token_ids)

    def left_out(self, rows: Range, columns: Range) -> Tensor:
        """[m, v] bool: true where a token is not in the row's set. Takes 32 bytes for each kept logit of the tile."""
        m, v = rows[1] - rows[0], columns[1] - columns[0]
        base_m = np.arange(*rows) * self.num_columns
        start_m, end_m = (np.searchsorted(self.key_J, base_m + column) for column in columns)
        length_m = end_m - start_m
        num_pairs = int(length_m.sum())
        device = self.sets.token_J.device
        # Pair i of the tile is pair i + shift of all, in row r: both follow from the row that i falls in.
        shift_m = start_m - np.cumsum(length_m) + length_m
        shift_m, length_m = torch.from_numpy(shift_m).to(device), torch.from_numpy(length_m).to(device)
        pair_j = torch.arange(num_pairs, device=device)
        pair_j += torch.repeat_interleave(shift_m, length_m, output_size=num_pairs)
        place_j = torch.repeat_interleave(torch.arange(m, device=device) * v, length_m, output_size=num_pairs)
        place_j += self.sets.token_J.index_select(0, pair_j)
        place_j -= columns[0]
        left_out = torch.ones(m * v, dtype=torch.bool, device=device)
        return left_out.index_fill_(0, place_j, False).view(m, v)
