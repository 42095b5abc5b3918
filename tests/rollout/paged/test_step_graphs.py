"""Sizes that decode steps are recorded for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.rollout.engines.paged.step_graphs import padded_rows


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 2), (2, 2), (3, 4), (4, 4), (17, 32), (32, 32), (33, 64), (256, 256), (257, 288)]
)
def test_none_is_one(num_rows: int, size: int):
    assert padded_rows(num_rows) == size


def test_sizes_are_few():
    assert len({padded_rows(num_rows) for num_rows in range(1, 513)}) == 20


@given(st.integers(1, 100_000))
def test_a_size_holds_its_rows_is_its_own_size_and_wastes_less_than_half(num_rows: int):
    size = padded_rows(num_rows)
    assert max(2, num_rows) <= size < max(3, min(2 * num_rows, num_rows + 32))
    assert padded_rows(size) == size
