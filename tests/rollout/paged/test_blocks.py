"""The pool against a plain count of holders, and every misuse of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.rollout.engines.paged.blocks import BlockPool


@given(st.integers(0, 9), st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 99))))
def test_a_block_is_free_when_nobody_holds_it(num_blocks: int, moves: list[tuple[str, int]]):
    pool = BlockPool(num_blocks)
    holders: list[int] = []
    for move, number in moves:
        if move == "allocate":
            blocks = pool.allocate(number % (pool.num_free + 1))
            assert not set(blocks) & set(holders) and len(set(blocks)) == len(blocks)
            holders += blocks
        elif holders:
            block = holders[number % len(holders)]
            if move == "share":
                pool.share([block])
                holders.append(block)
            else:
                pool.release([block])
                holders.remove(block)
        assert [pool.num_holders(block) for block in range(num_blocks)] == [holders.count(b) for b in range(num_blocks)]
        assert pool.num_free == num_blocks - len(set(holders))
    pool.release(holders)
    assert sorted(pool.allocate(num_blocks)) == list(range(num_blocks))


def test_misuse_is_a_defect():
    pool = BlockPool(3)
    block = pool.allocate(1)
    with pytest.raises(AssertionError, match="3 blocks were asked of 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="-1 blocks"):
        pool.allocate(-1)
    pool.release(block)
    with pytest.raises(AssertionError, match="released, but nobody holds it"):
        pool.release(block)
    with pytest.raises(AssertionError, match="shared, but nobody holds it"):
        pool.share(block)
