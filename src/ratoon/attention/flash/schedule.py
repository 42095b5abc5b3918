"""The calls that stock kernels make for a forest: every segment with itself, then descendants with each ancestor.

Level d pairs the rows below a node at depth d with that node's own rows. A row has one ancestor at
each depth, so the rows of a level are disjoint, and so are its keys.
"""

# Shape letters: T rows, S segments, B runs of a batch, L rows of a run.

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.layout import PackedLayout

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


Rows = slice | Tensor
"""Rows of a level: a slice where they are contiguous, else int64 row numbers."""


@dataclass(frozen=True, slots=True)
class VarlenLevel:
    """One varlen call: runs of rows, each with the keys of one segment."""

    query_rows: Rows
    key_rows: Rows
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    """[runs + 1] int32 on the device, into the level's rows. No run is without queries or keys."""

    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class VarlenSchedule:
    """One call a level, whatever the number of groups and nodes."""

    own: VarlenLevel
    """Every segment, causal with itself."""

    ancestors: tuple[VarlenLevel, ...]
    """For each depth of a node that has descendants: these, with all keys of the node."""


def build_varlen_schedule(plan: AttentionPlan) -> VarlenSchedule:
    layout, device = plan.layout, plan.device
    starts_S, ends_S = layout.segment_offsets[:-1], layout.segment_offsets[1:]
    lengths_S = ends_S - starts_S
    subtree_ends_S = layout.expiry_T[starts_S]

    def level(
        query_starts: NDArray[np.int32], num_queries: NDArray[np.int32], nodes: slice | NDArray[np.int64]
    ) -> VarlenLevel:
        return VarlenLevel(
            query_rows=_rows(query_starts, num_queries, device),
            key_rows=_rows(starts_S[nodes], lengths_S[nodes], device),
            cu_seqlens_q=_cu_seqlens(num_queries, device),
            cu_seqlens_k=_cu_seqlens(lengths_S[nodes], device),
            max_seqlen_q=int(num_queries.max(initial=0)),
            max_seqlen_k=int(lengths_S[nodes].max(initial=0)),
        )

    return VarlenSchedule(
        own=level(starts_S, lengths_S, slice(None)),
        ancestors=tuple(
            level(ends_S[nodes], subtree_ends_S[nodes] - ends_S[nodes], nodes)
            for nodes in _nodes_with_descendants(layout)
        ),
    )


def build_cpu_schedule(plan: AttentionPlan) -> CpuSchedule:
    layout = plan.layout
    lengths_S = np.diff(layout.segment_offsets)
    own: list[Runs] = []
    for length in np.unique(lengths_S).tolist():
        starts = layout.segment_offsets[:-1][lengths_S == length].tolist()
        own.extend(_batch_runs((starts,), (length,))[0])

    ancestors: list[AncestorBatch] = []
    for nodes in _nodes_with_descendants(layout):
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


def _nodes_with_descendants(layout: PackedLayout) -> list[NDArray[np.int64]]:
    """Segments that have descendants, by depth, each in row order."""
    depths: list[int] = []
    for parent in layout.segment_parent.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    depth_S = np.asarray(depths, np.int64)
    offsets = layout.segment_offsets
    is_inner_S = layout.expiry_T[offsets[:-1]] > offsets[1:] if depths else np.empty(0, bool)
    num_levels = int(depth_S[is_inner_S].max(initial=-1)) + 1
    return [np.flatnonzero(is_inner_S & (depth_S == depth)) for depth in range(num_levels)]


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


def _rows(starts: NDArray[np.int32], lengths: NDArray[np.int32], device: torch.device) -> Rows:
    """The rows of runs in ascending order."""
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        first = int(starts[0]) if starts.size else 0
        return slice(first, first + int(lengths.sum()))
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return torch.tensor(np.arange(shift.size) + shift, device=device)


def _cu_seqlens(lengths: NDArray[np.int32], device: torch.device) -> Tensor:
    cu_seqlens = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return torch.tensor(cu_seqlens, device=device)
