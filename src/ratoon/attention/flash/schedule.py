"""Batches of equal runs, for a kernel that knows no ragged ones: PyTorch's on the CPU."""

# Shape letters: T rows, S segments, B runs of a batch, L rows of a run.

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.attention.flash.levels import nodes_with_descendants
from ratoon.attention.plan import AttentionPlan

MAX_GATHERED_RUN = 8
"""Runs up to this many rows are cheaper to gather into one batch than to launch one by one."""


@dataclass(frozen=True, slots=True)
class EvenRuns:
    """B runs of L rows whose starts are evenly spaced: a batch that is a view."""

    start: int
    length: int
    count: int
    spacing: int

    def take(self, tensor: Tensor) -> Tensor:
        """[T, ...] -> view [B, L, ...]."""
        end = self.start + self.spacing * (self.count - 1) + self.length
        return tensor[self.start : end].unfold(0, self.length, self.spacing).movedim(-1, 1)

    def store(self, tensor: Tensor, value: Tensor) -> None:
        """Writes value [B, L, ...] to the rows."""
        self.take(tensor).copy_(value)

    def put_back(self, tensor: Tensor, taken: Tensor) -> None:
        """Nothing to do: what was taken is the tensor's own memory."""


@dataclass(frozen=True, slots=True)
class GatheredRuns:
    """B runs of L rows anywhere: a batch that is a copy."""

    index_BL: Tensor
    """[B, L] int64 row numbers, each at most once."""

    def take(self, tensor: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...]."""
        return tensor[self.index_BL]

    def store(self, tensor: Tensor, value: Tensor) -> None:
        """Writes value [B, L, ...] to the rows."""
        tensor[self.index_BL] = value.to(tensor.dtype)

    def put_back(self, tensor: Tensor, taken: Tensor) -> None:
        """After what `take` gave was changed in place."""
        tensor[self.index_BL] = taken


Runs = EvenRuns | GatheredRuns


@dataclass(frozen=True, slots=True)
class AncestorBatch:
    """B times: L rows that read all keys of one ancestor."""

    queries: Runs
    keys: Runs


@dataclass(frozen=True, slots=True)
class CpuSchedule:
    """Batches of equal shape."""

    own: tuple[Runs, ...]
    """Every segment once, causal with itself."""

    ancestors: tuple[AncestorBatch, ...]


def build_cpu_schedule(plan: AttentionPlan) -> CpuSchedule:
    layout = plan.layout
    lengths_S = np.diff(layout.segment_offsets)
    own: list[Runs] = []
    for length in np.unique(lengths_S).tolist():
        starts = layout.segment_offsets[:-1][lengths_S == length].tolist()
        own.extend(_batch_runs((starts,), (length,))[0])

    ancestors: list[AncestorBatch] = []
    for nodes in nodes_with_descendants(layout):
        shapes: defaultdict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for node in nodes.tolist():
            start, end = int(layout.segment_offsets[node]), int(layout.segment_offsets[node + 1])
            query_starts, key_starts = shapes[int(layout.expiry_T[start]) - end, end - start]
            query_starts.append(end)
            key_starts.append(start)
        for shape, starts in shapes.items():
            queries, keys = _batch_runs(starts, shape)
            ancestors.extend(AncestorBatch(*pair) for pair in zip(queries, keys, strict=True))
    return CpuSchedule(own=tuple(own), ancestors=tuple(ancestors))


def _batch_runs(starts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[Runs]]:
    """Batches of runs that all have the same lengths, alike for each of `starts` (queries, keys).

    Evenly spaced runs become one view. What then still falls apart into several batches is gathered
    into one if its runs are short.
    """
    spans = _even_spans(starts)
    if len(spans) > 1 and max(lengths) <= MAX_GATHERED_RUN:
        return [
            [GatheredRuns(torch.tensor(starts_B)[:, None] + torch.arange(length))]
            for starts_B, length in zip(starts, lengths, strict=True)
        ]
    return [
        [
            EvenRuns(starts_B[first], length, stop - first, starts_B[first + 1] - starts_B[first])
            if stop - first > 1
            else EvenRuns(starts_B[first], length, 1, length)
            for first, stop in spans
        ]
        for starts_B, length in zip(starts, lengths, strict=True)
    ]


def _even_spans(starts: Sequence[list[int]]) -> list[tuple[int, int]]:
    """Cuts run numbers into spans within which every list of starts is evenly spaced."""
    spans: list[tuple[int, int]] = []
    first, num_runs = 0, len(starts[0])
    while first < num_runs:
        stop = first + 1
        if stop < num_runs:
            steps = [starts_B[stop] - starts_B[first] for starts_B in starts]
            while stop < num_runs and all(
                starts_B[stop] - starts_B[stop - 1] == step for starts_B, step in zip(starts, steps, strict=True)
            ):
                stop += 1
        spans.append((first, stop))
        first = stop
    return spans
