"""Radix packing: rows are shared as deep as sequences agree, scored tokens never."""

import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layout.oracle import check_layout

from ratoon.layout import PackedLayout, pack_documents, pack_groups, pack_sequences
from ratoon.types import Prompt, Response, RolloutGroup

Tokens = list[int]
branching = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=8)


@settings(max_examples=300)
@given(branching)
def test_sequences_mean_what_they_are(sequences: list[Tokens]):
    """AReaL#889: training on trees of sequences had to be corrected."""
    layout = pack_sequences(sequences)
    check_layout(layout, sequences, first_scored=[1] * len(sequences))


@settings(max_examples=300)
@given(branching)
def test_a_row_for_each_distinct_prefix(sequences: list[Tokens]):
    """As few rows as the sequences have different non-empty prefixes: nothing is stored twice."""
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert pack_sequences(sequences).num_rows == len(prefixes)


@given(branching)
def test_segments_end_only_where_sequences_part_or_end(sequences: list[Tokens]):
    ends = {tuple(sequence) for sequence in sequences if sequence}
    prefixes = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    parting = {
        prefix for prefix in prefixes if len({longer[len(prefix)] for longer in prefixes if len(longer) > len(prefix)
        and longer[: len(prefix)] == prefix}) > 1
    }  # fmt: skip
    assert pack_sequences(sequences).num_segments == len(ends | parting)


@given(branching, st.randoms())
def test_input_order_changes_neither_rows_nor_what_is_scored(sequences: list[Tokens], random):
    shuffled = list(sequences)
    random.shuffle(shuffled)
    one, other = pack_sequences(sequences), pack_sequences(shuffled)
    assert one.num_rows == other.num_rows
    assert sorted(one.target_M.tolist()) == sorted(other.target_M.tolist())


def arrays(layout: PackedLayout) -> dict[str, list[int]]:
    return {name: getattr(layout, name).tolist() for name in PackedLayout.__slots__}


def test_sequences_that_share_nothing_pack_like_documents():
    sequences = [[3, 1, 2], [], [1], [2, 2, 2, 2], [0, 3]]
    assert arrays(pack_sequences(sequences)) == arrays(pack_documents(sequences))


def test_a_group_packs_to_the_rows_of_pack_groups():
    prompt, responses = [5, 5, 6], [[1, 9], [0, 9], [3]]
    group = RolloutGroup(Prompt("p", np.asarray(prompt)), tuple(Response(np.asarray(R)) for R in responses))
    radix, grouped = pack_sequences([prompt + R for R in responses]), pack_groups([group])
    for name in ("token_ids_T", "positions_T", "expiry_T", "segment_offsets", "segment_parent"):
        assert arrays(radix)[name] == arrays(grouped)[name]


def test_three_levels_by_hand():
    layout = pack_sequences([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [1, 9], [7]])
    assert layout.token_ids_T.tolist() == [1, 2, 3, 4, 5, 9, 7]
    assert layout.segment_parent.tolist() == [-1, 0, 1, 2, 2, 0, -1]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 3, 1, 0]
    assert layout.expiry_T.tolist() == [6, 5, 5, 4, 5, 6, 7]
    assert layout.sequence_segment_N.tolist() == [3, 4, 1, 5, 6]
    assert layout.target_M.tolist() == [2, 3, 4, 2, 3, 5, 2, 9]


def test_identical_sequences_share_every_row_and_are_each_scored():
    layout = pack_sequences([[4, 5, 6]] * 5)
    assert (layout.num_rows, layout.num_segments, layout.num_scored) == (3, 1, 10)
    assert layout.sequence_of_M.tolist() == [n for n in range(5) for _ in range(2)]
    assert layout.dedup_ratio == 5.0


def test_a_prefix_that_comes_after_the_longer_sequence():
    layout = pack_sequences([[1, 2, 3], [1, 2]])
    assert layout.segment_offsets.tolist() == [0, 2, 3]
    assert layout.sequence_segment_N.tolist() == [1, 0]


@pytest.mark.parametrize("sequences", [[], [[]], [[], [], []]])
def test_nothing_packs_to_nothing(sequences: list[Tokens]):
    layout = pack_sequences(sequences)
    assert (layout.num_rows, layout.num_scored, layout.num_sequences) == (0, 0, len(sequences))
    assert layout.sequence_segment_N.tolist() == [-1] * len(sequences)


def test_large_ids_sort_by_value_and_stay_whole():
    largest = 2**31 - 1
    sequences = [[largest, 0], [largest, largest], [255], [256], [65_536, 1], [1]]
    check_layout(pack_sequences(sequences), sequences, first_scored=[1] * len(sequences))


def test_a_chain_deeper_than_the_recursion_limit():
    """3,000 agent turns, each resumed from the last: 3,000 levels."""
    depth = 3_000
    assert depth > sys.getrecursionlimit()
    layout = pack_sequences([range(length) for length in range(1, depth + 1)])  # pyright: ignore[reportArgumentType]
    assert (layout.num_rows, layout.num_segments) == (depth, depth)
    assert layout.segment_parent.tolist() == list(range(-1, depth - 1))
    assert layout.expiry_T.tolist() == [depth] * depth
    assert layout.num_scored == depth * (depth - 1) // 2
    last = layout.sequence_of_M == depth - 1
    assert layout.predictor_row_M[last].tolist() == list(range(depth - 1))


def test_many_long_sequences_pack_fast():
    """64 conversations of 16 resumed turns, 2.2 million logical tokens."""
    rng = np.random.default_rng(0)
    sequences: list[np.ndarray] = []
    for index in range(64):
        conversation = rng.integers(0, 1000, 4096)
        conversation[0] = index  # nothing shared between conversations
        sequences += [conversation[: 256 * turn] for turn in range(1, 17)]
    start = time.process_time()
    layout = pack_sequences(sequences)
    assert time.process_time() - start < 1.0
    assert layout.num_rows == 64 * 4096


def test_a_bad_sequence_is_named():
    with pytest.raises(ValueError, match=r"sequence 1: token ids must be a 1-D array or list of integers"):
        pack_sequences([[1], [0.5]])
