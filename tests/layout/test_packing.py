"""Groups and documents, against an oracle that knows only sequences and the attention rule."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.oracle import check_layout, full_sequences

from ratoon.layout import PackedLayout, pack_documents, pack_groups
from ratoon.types import Prompt, Response, RolloutGroup

Tokens = list[int]
# Few distinct ids, so that equal prompts and equal beginnings are common.
token_lists = st.lists(st.integers(0, 2), max_size=6)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
group_lists = st.lists(st.tuples(prompts, st.lists(token_lists, max_size=4)), max_size=5)


def ids(tokens: Tokens) -> np.ndarray:
    return np.asarray(tokens, np.int64)


def groups_of(given_groups: list[tuple[Tokens, list[Tokens]]]) -> list[RolloutGroup]:
    return [
        RolloutGroup(Prompt("same id", ids(prompt)), tuple(Response(ids(response)) for response in responses))
        for prompt, responses in given_groups
    ]


@given(group_lists)
def test_groups_mean_what_their_sequences_mean(given_groups: list[tuple[Tokens, list[Tokens]]]):
    """Covers OpenRLHF#781 (response ranges misaligned after packing), OpenRLHF#587 and OpenRLHF#588 (segment ids
    ignored), verl#6268 and verl#6068 (labels shifted by one, wrong at an edge)."""
    groups = groups_of(given_groups)
    layout = pack_groups(groups)
    prompt_lengths = [len(prompt) for prompt, responses in given_groups for _ in responses]
    check_layout(layout, full_sequences(groups), first_scored=prompt_lengths)
    assert layout.num_rows == sum(group.num_rows for group in groups)
    assert layout.num_scored == sum(sum(group.response_lengths) for group in groups)


@given(st.lists(token_lists, max_size=7))
def test_documents_mean_what_they_are(documents: list[Tokens]):
    layout = pack_documents(documents)
    check_layout(layout, documents, first_scored=[1] * len(documents))
    assert layout.num_rows == sum(len(document) for document in documents)
    assert (layout.segment_parent == -1).all()


def test_one_group_by_hand():
    layout = pack_groups(groups_of([([10, 11, 12], [[20, 21], [30]])]))
    assert layout.token_ids_T.tolist() == [10, 11, 12, 20, 21, 30]
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert layout.expiry_T.tolist() == [6, 6, 6, 5, 5, 6]
    assert layout.segment_offsets.tolist() == [0, 3, 5, 6]
    assert layout.segment_parent.tolist() == [-1, 0, 0]
    assert layout.predictor_row_M.tolist() == [2, 3, 2]
    assert layout.target_M.tolist() == [20, 21, 30]
    assert layout.sequence_of_M.tolist() == [0, 0, 1]
    assert layout.sequence_segment_N.tolist() == [1, 2]
    assert layout.dedup_ratio == 9 / 6


def test_dtypes_are_the_documented_ones():
    for layout in (
        pack_groups(groups_of([([1], [[2]])])),
        pack_groups([]),
        pack_documents([[1, 2]]),
        pack_documents([]),
    ):
        wide = {name for name in PackedLayout.__slots__ if getattr(layout, name).dtype == np.int64}
        assert wide == {"token_ids_T", "target_M"}
        assert all(getattr(layout, name).dtype == np.int32 for name in set(PackedLayout.__slots__) - wide)


def test_empty_responses_move_nobody_elses_tokens():
    """Covers verl#6310 (zero-length response: the reward lands elsewhere)."""
    layout = pack_groups(groups_of([([5, 6], [[], [7, 8], [], [9]]), ([4], [[]])]))
    assert layout.num_sequences == 5
    assert layout.sequence_of_M.tolist() == [1, 1, 3]
    assert layout.predictor_row_M.tolist() == [1, 2, 1]
    assert layout.sequence_lengths_N.tolist() == [2, 4, 2, 3, 1]
    rewards_N = np.asarray([10.0, 20.0, 30.0, 40.0, 50.0])
    assert rewards_N[layout.sequence_of_M].tolist() == [20.0, 20.0, 40.0]


def test_lengths_are_a_contract_not_read_from_positions():
    """Covers prime-rl#2944: boundaries survive where positions say nothing (every document one token long)."""
    layout = pack_documents([[7], [7], [], [7]])
    assert layout.positions_T.tolist() == [0, 0, 0]
    assert layout.segment_offsets.tolist() == [0, 1, 2, 3]
    assert layout.sequence_lengths_N.tolist() == [1, 1, 0, 1]
    assert layout.expiry_T.tolist() == [1, 2, 3]
    assert layout.num_scored == 0


def test_groups_with_equal_prompts_stay_apart():
    layout = pack_groups(groups_of([([1, 2], [[3]]), ([1, 2], [[3]])]))
    assert layout.num_rows == 6
    assert layout.segment_parent.tolist() == [-1, 0, -1, 2]


def test_equal_responses_stay_apart():
    layout = pack_groups(groups_of([([1], [[2, 2], [2, 2]])]))
    assert layout.num_rows == 5
    assert layout.num_scored == 4


@pytest.mark.parametrize("layout", [pack_groups([]), pack_documents([]), pack_documents([[], []])])
def test_nothing_packs_to_nothing(layout: PackedLayout):
    """Covers verl#1270 (a pack of zero sequences)."""
    assert (layout.num_rows, layout.num_scored, layout.num_segments, layout.num_logical_tokens) == (0, 0, 0, 0)
    assert layout.dedup_ratio == 1.0


def test_a_group_without_responses_keeps_its_rows_and_scores_nothing():
    layout = pack_groups(groups_of([([1, 2], []), ([3], [[4]])]))
    assert (layout.num_rows, layout.num_scored, layout.num_sequences) == (4, 1, 1)


def test_a_bad_document_is_named():
    with pytest.raises(ValueError, match=r"document 1: token ids must lie in \[0, 2\*\*31\), got -100 to 2"):
        pack_documents([[1], [2, -100]])


def test_a_layout_does_not_follow_the_callers_array():
    document = np.asarray([1, 2, 3])
    layout = pack_documents([document])
    document[:] = 9
    assert layout.token_ids_T.tolist() == [1, 2, 3]


def test_a_million_rows_pack_in_less_than_a_third_of_a_second():
    rng = np.random.default_rng(0)
    lengths = np.full((1024, 17), 58)
    lengths[:, 0] = 1_000_000 // 1024 - 16 * 58 + 1
    groups = [
        RolloutGroup(
            Prompt(index, rng.integers(0, 1000, row[0])), tuple(Response(rng.integers(0, 1000, R)) for R in row[1:])
        )
        for index, row in enumerate(lengths)
    ]
    seconds: list[float] = []
    for _ in range(3):
        start = time.process_time()
        layout = pack_groups(groups)
        seconds.append(time.process_time() - start)
        assert layout.num_rows >= 1_000_000
    assert min(seconds) < 0.3
