"""Pieces of bounded size lose nothing, repeat nothing and keep the order."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ratoon.weight_sync import iter_buckets

DTYPES = [torch.bfloat16, torch.float32, torch.uint8]
tensors = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=30)


@given(tensors, st.integers(1, 120))
def test_buckets_are_the_same_tensors_within_the_limit(sizes: list[tuple[int, torch.dtype]], max_bytes: int):
    """sglang#14178: garbled answers with small buckets. Whatever the size, what arrives is what was sent."""
    named = [(f"w{index}", torch.empty(count, dtype=dtype)) for index, (count, dtype) in enumerate(sizes)]
    buckets = list(iter_buckets(named, max_bytes))
    sent = [pair for bucket in buckets for pair in bucket]
    assert [name for name, _ in sent] == [name for name, _ in named]
    assert all(left is right for (_, left), (_, right) in zip(sent, named, strict=True))
    for bucket in buckets:
        num_bytes = sum(tensor.nbytes for _, tensor in bucket)
        assert bucket and (len(bucket) == 1 or num_bytes <= max_bytes)
    for bucket, following in pairwise(buckets):  # none is smaller than it must be
        num_bytes = sum(tensor.nbytes for _, tensor in bucket)
        assert num_bytes >= max_bytes or num_bytes + following[0][1].nbytes > max_bytes


def test_at_most_one_tensor_is_made_ahead():
    made = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal made
        for index in range(9):
            made += 1
            yield str(index), torch.empty(4, dtype=torch.uint8)

    used = 0
    for bucket in iter_buckets(source(), 10):
        used += len(bucket)
        assert made <= used + 1


def test_a_limit_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        next(iter_buckets([], 0))
