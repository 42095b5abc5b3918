"""Soft overlong shaping."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import soft_overlong_penalty


def oracle(length: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """The three cases of DAPO's eq. 13."""
    if length <= max_response_tokens - buffer_tokens:
        return 0.0
    if length <= max_response_tokens:
        return ((max_response_tokens - buffer_tokens) - length) / buffer_tokens
    return -1.0


@given(st.lists(st.integers(0, 300), max_size=9), st.integers(1, 200), st.data())
def test_matches_the_three_cases(lengths: list[int], limit: int, data: st.DataObject):
    buffer = data.draw(st.integers(1, limit))
    penalty_N = soft_overlong_penalty(lengths, max_response_tokens=limit, buffer_tokens=buffer)
    assert penalty_N.dtype == np.float64
    assert penalty_N.tolist() == [oracle(length, limit, buffer) for length in lengths]


def test_the_papers_numbers():
    lengths = [0, 16_384, 18_432, 20_480, 30_000]
    penalty_N = soft_overlong_penalty(lengths, max_response_tokens=20_480, buffer_tokens=4_096)
    assert penalty_N.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert not np.signbit(penalty_N[:2]).any()


@pytest.mark.parametrize("buffer_tokens", [0, -1, 101])
def test_a_buffer_that_cannot_act_is_refused(buffer_tokens: int):
    with pytest.raises(ValueError, match="from 1 to max_response_tokens=100"):
        soft_overlong_penalty([5], max_response_tokens=100, buffer_tokens=buffer_tokens)


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        soft_overlong_penalty([3, -1], max_response_tokens=10, buffer_tokens=2)
