"""Which blocks of the cache are free, and how many hold each of the others."""

from collections.abc import Sequence


class BlockPool:
    """Hands out block indices. One index addresses the block of every layer.

    Whatever misuses it is a defect of the engine and fails an assertion.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, f"a pool of {num_blocks} blocks"
        self._num_holders = [0] * num_blocks
        # The lowest is handed out first: easier to read, and what was freed last is likelier to be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def allocate(self, num_blocks: int) -> list[int]:
        """That many free blocks, each with one holder."""
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} blocks were asked of {self.num_free} free ones"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            assert self._num_holders[block] == 0, f"block {block} was free and held"
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of the blocks."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is shared, but nobody holds it"
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of the blocks; those without any are free again."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is released, but nobody holds it"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)
