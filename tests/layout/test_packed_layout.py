"""A layout that breaks an invariant cannot be built, and one that was built cannot change."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from ratoon.layout import PackedLayout, pack_groups, pack_sequences
from ratoon.layout.packed_layout import build_layout, derive_positions_and_expiry
from ratoon.types import Prompt, Response, RolloutGroup


def example() -> PackedLayout:
    """Rows: prompt 0-2, responses 3-4 and 5, prompt 6, response 7-8. Sequences 0, 1, 2 (empty), 3."""
    return pack_groups(
        [
            RolloutGroup(
                Prompt("a", np.asarray([10, 11, 12])),
                tuple(Response(np.asarray(tokens, np.int64)) for tokens in ([20, 21], [30], [])),
            ),
            RolloutGroup(Prompt("b", np.asarray([13])), (Response(np.asarray([40, 41])),)),
        ]
    )


CORRUPTIONS: list[tuple[str, str, list[int]]] = [
    ("positions_T", "positions do not follow", [0, 1, 2, 3, 4, 4, 0, 1, 2]),
    ("positions_T", "positions do not follow", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ("positions_T", "positions do not follow", [0, 1, 2, 3, 4, 3, 0, 1]),
    ("expiry_T", "expiry does not follow", [6, 6, 6, 6, 5, 6, 9, 9, 9]),
    ("expiry_T", "expiry does not follow", [9, 9, 9, 5, 5, 6, 9, 9, 9]),
    ("token_ids_T", "segments must cover rows 0 to 8", [10, 11, 12, 20, 21, 30, 13, 40]),
    ("segment_offsets", "segments must cover", [1, 3, 5, 6, 7, 9]),
    ("segment_offsets", "segments must cover", [0, 3, 5, 6, 7, 8]),
    ("segment_offsets", "a segment is empty", [0, 3, 3, 6, 7, 9]),
    ("segment_offsets", "a segment is empty", [0, 5, 3, 6, 7, 9]),
    ("segment_offsets", "5 segments need 6 offsets", [0, 3, 5, 6, 9]),
    ("segment_offsets", "positions do not follow", [0, 2, 5, 6, 7, 9]),
    ("segment_parent", "depth-first order", [-1, 0, 0, -1, 0]),  # its parent's tree has ended
    ("segment_parent", "depth-first order", [-1, 0, 0, 3, 3]),  # its own parent
    ("segment_parent", "depth-first order", [-1, 4, 0, -1, 3]),  # a parent that comes later
    ("segment_parent", "depth-first order", [-1, 0, 0, -2, 3]),
    ("segment_parent", "positions do not follow", [-1, 0, 1, -1, 3]),
    ("segment_parent", "5 segments|4 segments need 5 offsets", [-1, 0, 0, -1]),
    ("predictor_row_M", "outside", [2, 3, 2, 6, 9]),
    ("predictor_row_M", "outside", [-1, 3, 2, 6, 7]),
    ("predictor_row_M", "another sequence's row", [2, 3, 6, 6, 7]),  # another group's prompt
    ("predictor_row_M", "another sequence's row", [2, 3, 3, 6, 7]),  # a sibling's token
    ("predictor_row_M", "position order", [3, 2, 2, 6, 7]),
    ("predictor_row_M", "position order", [2, 2, 2, 6, 7]),
    ("predictor_row_M", "4 predictor rows", [2, 3, 2, 6]),
    ("target_M", "5 predictor rows and 5 sequence numbers for 4", [20, 21, 30, 40]),
    ("sequence_of_M", "sequence by sequence", [0, 1, 0, 3, 3]),
    ("sequence_of_M", "no sequence", [0, 0, 1, 3, 4]),
    ("sequence_of_M", "no sequence", [-1, 0, 1, 3, 3]),
    ("sequence_of_M", "another sequence's row|position order", [0, 1, 1, 3, 3]),
    ("sequence_segment_N", "not there", [1, 2, 0, 5]),
    ("sequence_segment_N", "not there", [1, 2, 0, -2]),
    ("sequence_segment_N", "no sequence", [1, 2, 0]),
    ("sequence_segment_N", "another sequence's row", [2, 1, 0, 4]),
    ("sequence_segment_N", "another sequence's row", [-1, 2, 0, 4]),  # an empty sequence with scored tokens
]


def test_the_example_is_what_the_corruptions_assume():
    layout = example()
    assert layout.segment_offsets.tolist() == [0, 3, 5, 6, 7, 9]
    assert layout.segment_parent.tolist() == [-1, 0, 0, -1, 3]
    assert layout.expiry_T.tolist() == [6, 6, 6, 5, 5, 6, 9, 9, 9]
    assert layout.predictor_row_M.tolist() == [2, 3, 2, 6, 7]
    assert layout.sequence_of_M.tolist() == [0, 0, 1, 3, 3]
    assert layout.sequence_segment_N.tolist() == [1, 2, 0, 4]


@pytest.mark.parametrize(("field", "message", "values"), CORRUPTIONS)
def test_a_corrupt_field_is_refused(field: str, message: str, values: list[int]):
    layout = example()
    changed: Any = {field: np.asarray(values, getattr(layout, field).dtype)}
    with pytest.raises(AssertionError, match=message):
        replace(layout, **changed)


def test_every_field_is_covered_by_a_corruption():
    assert {field for field, _, _ in CORRUPTIONS} == set(PackedLayout.__slots__)


def test_padding_absorbed_into_the_last_segment_is_refused():
    """Covers NeMo-RL#3182 (alignment padding taken for the last sequence's tokens)."""
    layout = example()
    with pytest.raises(AssertionError, match="segments must cover rows 0 to 12"):
        replace(layout, token_ids_T=np.concatenate([layout.token_ids_T, [0, 0, 0]]))


@pytest.mark.parametrize("name", PackedLayout.__slots__)
def test_arrays_are_read_only(name: str):
    for layout in (example(), pack_sequences([[1, 2], [1, 3]])):
        with pytest.raises(ValueError, match="read-only"):
            getattr(layout, name)[0] = 1


def test_fields_cannot_be_replaced():
    with pytest.raises(FrozenInstanceError):
        example().token_ids_T = np.zeros(9, np.int64)  # pyright: ignore[reportAttributeAccessIssue]


def test_positions_and_expiry_of_a_deep_forest():
    offsets, parents = np.asarray([0, 2, 3, 5, 6, 7]), np.asarray([-1, 0, 1, 0, -1])
    positions_T, expiry_T = derive_positions_and_expiry(offsets, parents)
    assert positions_T.tolist() == [0, 1, 2, 3, 4, 2, 0]
    assert expiry_T.tolist() == [6, 6, 5, 5, 5, 6, 7]


def test_more_rows_than_int32_holds_are_refused_by_number():
    none = np.empty(0, np.int64)
    with pytest.raises(ValueError, match=r"at most 2\*\*31 - 1 rows, got 2,147,483,648"):
        build_layout(
            token_ids_T=none,
            segment_lengths=np.asarray([2**31]),
            segment_parent=np.asarray([-1]),
            predictor_row_M=none,
            target_M=none,
            sequence_of_M=none,
            sequence_segment_N=none,
        )


def test_rows_of_a_sequence():
    layout = example()
    assert [layout.sequence_rows(n).tolist() for n in range(4)] == [[0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2], [6, 7, 8]]
