"""The varlen calls that stock kernels make for a forest: each segment with itself, then descendants with each ancestor.

Level d pairs the rows below a node at depth d with that node's own rows. A row has one ancestor at
each depth, so the rows of a level are disjoint, and so are its keys: a level is one call, whatever
the number of groups and nodes. The calls read all rows in place, and touch only those of their runs.
"""

# Shape letters: T rows, S segments, R runs of a level.

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.plan import AttentionPlan
from ratoon.attention.transfer import to_device
from ratoon.layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns:
    """Every segment, causal with itself."""

    offsets: Tensor
    """[S + 1] int32: where segments start, in rows and in keys."""

    max_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Runs of rows, each with all keys of one segment. No run is without rows or keys."""

    query_starts: Tensor
    """[R + 1] int32. Row at which each run starts; the last number is T, and starts none."""

    num_queries: Tensor
    """[R] int32."""

    key_starts: Tensor
    """[R + 1] int32, as `query_starts`."""

    num_keys: Tensor
    """[R] int32."""

    max_queries: int
    max_keys: int

    reads_T: Tensor
    """[T] bool: rows of a run. What a kernel leaves in the others is not defined."""

    is_read_T: Tensor
    """[T] bool: keys of a run, likewise."""


@dataclass(frozen=True, slots=True)
class Levels:
    """For kernels that take a start and a length for each run (FA3, FA4)."""

    own: OwnRuns
    ancestors: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveringLevel:
    """A level for kernels whose runs must follow one another (FA2): between its runs stand runs of rows without keys.

    Such a run costs nothing but the start of a block. Keys have no such filling: for keys that no row
    reads, FA2's backward writes a zero for every query head, which costs more than to copy the keys
    that are read.
    """

    query_offsets: Tensor
    """[2 * R + 2] int32 from 0 to T: rows without keys, a run, rows without keys, ..."""

    key_offsets: Tensor
    """[2 * R + 2] int32 into `key_rows`; every other run is empty."""

    key_rows: slice | Tensor
    """Keys that are read: a slice where they lie together, else int64 row numbers."""

    max_queries: int
    """Of the runs with keys. Rows of longer runs without keys may stay unwritten."""

    max_keys: int

    reads_T: Tensor
    """[T] bool: rows of a run with keys. What the kernel leaves in the others is not defined."""


@dataclass(frozen=True, slots=True)
class CoveringLevels:
    own: OwnRuns
    ancestors: tuple[CoveringLevel, ...]


def build_levels(plan: AttentionPlan) -> Levels:
    runs = _NodeRuns.of(plan.layout)
    num_rows, device = plan.num_rows, plan.device

    def level(nodes: NDArray[np.int64]) -> Level:
        key_starts, query_starts, query_ends = runs.start_S[nodes], runs.end_S[nodes], runs.subtree_end_S[nodes]
        num_keys, num_queries = query_starts - key_starts, query_ends - query_starts
        return Level(
            query_starts=_to_device(np.append(query_starts, num_rows), device),
            num_queries=_to_device(num_queries, device),
            key_starts=_to_device(np.append(key_starts, num_rows), device),
            num_keys=_to_device(num_keys, device),
            max_queries=int(num_queries.max()),
            max_keys=int(num_keys.max()),
            reads_T=_mask_of_runs(query_starts, query_ends, num_rows, device),
            is_read_T=_mask_of_runs(key_starts, query_starts, num_rows, device),
        )

    return Levels(_own_runs(plan), tuple(level(nodes) for nodes in nodes_with_descendants(plan.layout)))


def build_covering_levels(plan: AttentionPlan) -> CoveringLevels:
    runs = _NodeRuns.of(plan.layout)
    num_rows, device = plan.num_rows, plan.device

    def level(nodes: NDArray[np.int64]) -> CoveringLevel:
        key_starts, query_starts, query_ends = runs.start_S[nodes], runs.end_S[nodes], runs.subtree_end_S[nodes]
        num_keys = query_starts - key_starts
        query_edges = np.stack([query_starts, query_ends], axis=1).ravel()
        num_keys_of_runs = np.stack([np.zeros_like(num_keys), num_keys], axis=1).ravel()
        return CoveringLevel(
            query_offsets=_to_device(np.concatenate([[0], query_edges, [num_rows]]), device),
            key_offsets=_to_device(np.concatenate([[0], num_keys_of_runs.cumsum(), [num_keys.sum()]]), device),
            key_rows=_rows(key_starts, num_keys, device),
            max_queries=int((query_ends - query_starts).max()),
            max_keys=int(num_keys.max()),
            reads_T=_mask_of_runs(query_starts, query_ends, num_rows, device),
        )

    return CoveringLevels(_own_runs(plan), tuple(level(nodes) for nodes in nodes_with_descendants(plan.layout)))


def has_descendants(plan: AttentionPlan) -> bool:
    """Whether any segment has; if none, the first level is all. Costs less than to build levels."""
    runs = _NodeRuns.of(plan.layout)
    return bool((runs.subtree_end_S > runs.end_S).any())


def nodes_with_descendants(layout: PackedLayout) -> list[NDArray[np.int64]]:
    """Segments that have descendants, by depth, each in row order."""
    depths: list[int] = []
    for parent in layout.segment_parent.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    depth_S = np.asarray(depths, np.int64)
    offsets = layout.segment_offsets
    is_inner_S = layout.expiry_T[offsets[:-1]] > offsets[1:] if depths else np.empty(0, bool)
    num_levels = int(depth_S[is_inner_S].max(initial=-1)) + 1
    return [np.flatnonzero(is_inner_S & (depth_S == depth)) for depth in range(num_levels)]


@dataclass(frozen=True, slots=True)
class _NodeRuns:
    """A node's keys are [start, end), its descendants' rows [end, subtree_end)."""

    start_S: NDArray[np.int32]
    end_S: NDArray[np.int32]
    subtree_end_S: NDArray[np.int32]

    @classmethod
    def of(cls, layout: PackedLayout) -> "_NodeRuns":
        starts_S = layout.segment_offsets[:-1]
        return cls(starts_S, layout.segment_offsets[1:], layout.expiry_T[starts_S])


def _own_runs(plan: AttentionPlan) -> OwnRuns:
    offsets = plan.layout.segment_offsets
    return OwnRuns(offsets=_to_device(offsets, plan.device), max_rows=int(np.diff(offsets).max(initial=0)))


def _mask_of_runs(starts: NDArray[np.int32], ends: NDArray[np.int32], num_rows: int, device: torch.device) -> Tensor:
    steps = np.zeros(num_rows + 1, np.int32)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    return to_device(steps[:-1].cumsum() > 0, device)


def _rows(starts: NDArray[np.int32], lengths: NDArray[np.int32], device: torch.device) -> slice | Tensor:
    """The rows of runs in ascending order."""
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[0] + lengths.sum()))
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return to_device(np.arange(shift.size) + shift, device)


def _to_device(numbers: NDArray[np.integer], device: torch.device) -> Tensor:
    return to_device(numbers.astype(np.int32), device)
