"""The token order of one microbatch, and the one integer per key that says who reads it."""

# Shape letters: T rows, M scored tokens, S segments, N sequences (responses or documents).

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """A forest of token segments in depth-first order.

    Row `q` attends key `k` iff `k <= q < expiry_T[k]`. Rows hold hidden states; the loss lives on
    scored tokens, because the last row of a prompt predicts the first token of many responses.
    Invariants are checked when the layout is built; arrays are read-only.
    """

    token_ids_T: NDArray[np.int64]
    """[T] int64."""

    positions_T: NDArray[np.int32]
    """[T] int32. Logical position of each row in its sequence: a response starts at P."""

    expiry_T: NDArray[np.int32]
    """[T] int32. The row at which the subtree of the key's segment ends."""

    segment_offsets: NDArray[np.int32]
    """[S + 1] int32. Segment s owns rows [offsets[s], offsets[s + 1]); no segment is empty."""

    segment_parent: NDArray[np.int32]
    """[S] int32. The segment that s continues; -1 for a root."""

    predictor_row_M: NDArray[np.int32]
    """[M] int32. The row whose hidden state scores the token."""

    target_M: NDArray[np.int64]
    """[M] int64. The token's id."""

    sequence_of_M: NDArray[np.int32]
    """[M] int32, ascending. Which sequence the token belongs to, in input order."""

    sequence_segment_N: NDArray[np.int32]
    """[N] int32. The segment in which each sequence ends; -1 for an empty sequence."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            getattr(self, name).setflags(write=False)
        self._check_forest()
        self._check_scored_tokens()

    @property
    def num_rows(self) -> int:
        return self.token_ids_T.size

    @property
    def num_scored(self) -> int:
        return self.target_M.size

    @property
    def num_segments(self) -> int:
        return self.segment_parent.size

    @property
    def num_sequences(self) -> int:
        return self.sequence_segment_N.size

    @property
    def sequence_lengths_N(self) -> NDArray[np.int64]:
        """[N] int64. Tokens of each sequence from its first, shared ones included."""
        lengths_N = np.zeros(self.num_sequences, np.int64)
        ends_somewhere = self.sequence_segment_N >= 0
        last_rows = self.segment_offsets[self.sequence_segment_N[ends_somewhere] + 1] - 1
        lengths_N[ends_somewhere] = self.positions_T[last_rows].astype(np.int64) + 1
        return lengths_N

    @property
    def num_logical_tokens(self) -> int:
        """Tokens that the sequences hold when each is stored by itself."""
        return int(self.sequence_lengths_N.sum())

    @property
    def dedup_ratio(self) -> float:
        """Logical tokens over rows; 1 where nothing is shared (and for no rows at all)."""
        return self.num_logical_tokens / self.num_rows if self.num_rows else 1.0

    def sequence_rows(self, sequence: int) -> NDArray[np.int64]:
        """[length] int64. The rows that hold a sequence's tokens, first to last."""
        segment = int(self.sequence_segment_N[sequence])
        ranges: list[NDArray[np.int64]] = []
        while segment >= 0:
            ranges.append(np.arange(self.segment_offsets[segment], self.segment_offsets[segment + 1], dtype=np.int64))
            segment = int(self.segment_parent[segment])
        return np.concatenate(ranges[::-1]) if ranges else np.empty(0, np.int64)

    def _check_forest(self) -> None:
        offsets, num_rows = self.segment_offsets, self.num_rows
        assert offsets.size == self.num_segments + 1, (
            f"{self.num_segments} segments need {self.num_segments + 1} offsets"
        )
        assert offsets[0] == 0 and offsets[-1] == num_rows, f"segments must cover rows 0 to {num_rows}"
        assert (np.diff(offsets) > 0).all(), "a segment is empty or its rows run backwards"
        positions_T, expiry_T = derive_positions_and_expiry(offsets, self.segment_parent)
        assert np.array_equal(positions_T, self.positions_T), "positions do not follow the segments"
        assert np.array_equal(expiry_T, self.expiry_T), "expiry does not follow the segments"
        assert self.sequence_segment_N.size == 0 or (
            self.sequence_segment_N.min() >= -1 and self.sequence_segment_N.max() < self.num_segments
        ), "a sequence ends in a segment that is not there"

    def _check_scored_tokens(self) -> None:
        num_scored = self.num_scored
        assert self.predictor_row_M.size == num_scored and self.sequence_of_M.size == num_scored, (
            f"{self.predictor_row_M.size} predictor rows and {self.sequence_of_M.size} sequence numbers "
            f"for {num_scored} scored tokens"
        )
        if num_scored == 0:
            return
        assert self.predictor_row_M.min() >= 0 and self.predictor_row_M.max() < self.num_rows, (
            f"a predictor row lies outside [0, {self.num_rows})"
        )
        sequence_of_M, position_M = self.sequence_of_M, self.positions_T[self.predictor_row_M]
        assert sequence_of_M[0] >= 0 and sequence_of_M[-1] < self.num_sequences, "a scored token has no sequence"
        step_M = np.diff(sequence_of_M)
        assert (step_M >= 0).all(), "scored tokens must stand sequence by sequence"
        assert (np.diff(position_M)[step_M == 0] > 0).all(), "scored tokens must stand in position order"
        # A row predicts a token of a sequence only if that sequence runs through the row.
        last_row_M = self.segment_offsets[self.sequence_segment_N[sequence_of_M] + 1] - 1
        runs_through_M = (self.predictor_row_M <= last_row_M) & (last_row_M < self.expiry_T[self.predictor_row_M])
        assert runs_through_M.all(), "a token is scored from another sequence's row"
        self._check_targets(last_row_M)

    def _check_targets(self, last_row_M: IntArray) -> None:
        """Each target is the token after its predictor row, where a neighbour in M or the sequence's end shows it."""
        position_M = self.positions_T[self.predictor_row_M]
        is_next_M = np.append((np.diff(self.sequence_of_M) == 0) & (np.diff(position_M) == 1), False)
        is_last_M = position_M + 1 == self.positions_T[last_row_M]
        assert (position_M < self.positions_T[last_row_M]).all(), "a token is scored from its sequence's last row"
        next_row_M = np.where(is_next_M, np.append(self.predictor_row_M[1:], 0), last_row_M)
        is_right_M = self.token_ids_T[next_row_M] == self.target_M
        assert is_right_M[is_next_M | is_last_M].all(), "a target is not the token after its predictor row"


def derive_positions_and_expiry(
    segment_offsets: IntArray, segment_parent: IntArray
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[S + 1], [S] -> positions [T] int32, expiry [T] int32.

    Fails where the segments are not in depth-first order.
    """
    offsets: list[int] = segment_offsets.tolist()
    parents: list[int] = segment_parent.tolist()
    first_position = [0] * len(parents)
    subtree_end = offsets[1:]
    path: list[int] = []  # the segments that the next one may continue
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        assert (parent == -1) == (not path), (
            f"segment {segment} continues segment {parent}, which has ended: segments must be in depth-first order"
        )
        if path:
            first_position[segment] = first_position[parent] + offsets[parent + 1] - offsets[parent]
        path.append(segment)
    for segment in range(len(parents) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0:
            subtree_end[parent] = max(subtree_end[parent], subtree_end[segment])

    lengths = np.diff(segment_offsets)
    shift = np.asarray(first_position, np.int64) - segment_offsets[:-1]
    positions_T = np.arange(offsets[-1], dtype=np.int64) + np.repeat(shift, lengths)
    expiry_T = np.repeat(np.asarray(subtree_end, np.int32), lengths)
    return positions_T.astype(np.int32), expiry_T


def build_layout(
    *,
    token_ids_T: IntArray,
    segment_lengths: IntArray,
    segment_parent: IntArray,
    predictor_row_M: IntArray,
    target_M: IntArray,
    sequence_of_M: IntArray,
    sequence_segment_N: IntArray,
) -> PackedLayout:
    """A checked layout from its segments and scored tokens; positions and expiry follow from them."""
    num_rows = int(segment_lengths.sum())
    if num_rows > np.iinfo(np.int32).max:
        raise ValueError(f"a layout holds at most 2**31 - 1 rows, got {num_rows:,}; pack fewer sequences at a time")
    segment_offsets = np.zeros(segment_lengths.size + 1, np.int32)
    np.cumsum(segment_lengths, out=segment_offsets[1:])
    positions_T, expiry_T = derive_positions_and_expiry(segment_offsets, segment_parent)
    return PackedLayout(
        token_ids_T=np.asarray(token_ids_T, np.int64),
        positions_T=positions_T,
        expiry_T=expiry_T,
        segment_offsets=segment_offsets,
        segment_parent=np.asarray(segment_parent, np.int32),
        predictor_row_M=np.asarray(predictor_row_M, np.int32),
        target_M=np.asarray(target_M, np.int64),
        sequence_of_M=np.asarray(sequence_of_M, np.int32),
        sequence_segment_N=np.asarray(sequence_segment_N, np.int32),
    )
