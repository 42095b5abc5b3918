"""Padding changes nothing but the number of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.oracle import attended_rows, check_layout, full_sequences
from tests.layout.test_packing import group_lists, groups_of

from ratoon.layout import pack_documents, pack_groups, pad_rows


@given(group_lists, st.integers(0, 4))
def test_padding_reads_itself_and_is_read_by_nothing(given_groups: list[tuple[list[int], list[list[int]]]], more: int):
    groups = groups_of(given_groups)
    layout = pack_groups(groups)
    padded = pad_rows(layout, layout.num_rows + more)
    assert padded.num_rows == layout.num_rows + more
    prompt_lengths = [len(prompt) for prompt, responses in given_groups for _ in responses]
    check_layout(padded, full_sequences(groups), first_scored=prompt_lengths)
    for name in ("token_ids_T", "positions_T", "expiry_T"):
        assert np.array_equal(getattr(padded, name)[: layout.num_rows], getattr(layout, name)), name
    for row in range(layout.num_rows, padded.num_rows):
        assert attended_rows(padded, row) == [row] and padded.expiry_T[row] == row + 1


def test_a_layout_is_not_cut():
    layout = pack_documents([[3, 4, 5]])
    assert pad_rows(layout, 3) is layout
    with pytest.raises(ValueError, match="3 rows cannot be padded to 2"):
        pad_rows(layout, 2)
