"""Which blocks the new token of each response reads: work for the kernels, built on the host when lengths cross blocks.

A response reads its prompt, in blocks that its siblings read too, and its own tokens. Both are cut at fixed numbers of
keys from their first, whatever else is in the batch, so that a response's sums do not depend on its company.
"""

# Shape letters: B responses, U prompts, I items, F block numbers of all tables, X members of all items.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = ("first_member", "num_members", "table", "first_key", "length", "first_position", "slot")
"""Columns of an item: members are numbers of responses, `members[first_member:][:num_members]`; block numbers of its
keys are `blocks[table:]`; its keys end with the split or with `lengths[length]`; the key at 0 of its table has the
position `positions[first_position]`; its sums go to `slot` of each member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """A prompt in the cache, and the responses of the batch that read it."""

    blocks: Sequence[int]
    num_tokens: int
    rows: Sequence[int]
    """Of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedReads:
    """int32 arrays on the host; what changes from token to token (`lengths`) is advanced on the device."""

    block_tokens: int
    split_keys: int

    blocks_F: NDArray[np.int32]
    members_X: NDArray[np.int32]
    shared_I: NDArray[np.int32]
    """[I, 7]: items of prompts."""

    own_I: NDArray[np.int32]
    """[I, 7]: items of own tokens, one member each."""

    lengths: NDArray[np.int32]
    """[U + B]: tokens of each prompt; then of each response, the new one included. The latter grow."""

    own_table_B: NDArray[np.int32]
    """[B] where a response's own blocks begin in `blocks`."""

    prompt_tokens_B: NDArray[np.int32]
    """[B] the position of each response's first own token; behind it [B] 0 for prompts' items."""

    num_slots_B: NDArray[np.int32]

    @property
    def num_prompts(self) -> int:
        return self.lengths.size - self.own_table_B.size

    @property
    def max_slots(self) -> int:
        return int(self.num_slots_B.max(initial=0))


def build_reads(
    prompts: Sequence[PromptTable],
    own_blocks: Sequence[Sequence[int]],
    own_tokens: Sequence[int],
    *,
    block_tokens: int,
    split_keys: int,
    max_members: int,
    room_tokens: int = 0,
) -> PagedReads:
    """own_blocks, own_tokens: of each of B responses, the new token included.

    max_members: of one item; more siblings take several. room_tokens: by how many tokens responses may grow before
    this is built anew; their blocks must be in `own_blocks`.
    """
    assert split_keys % block_tokens == 0, f"splits of {split_keys} keys are not whole blocks of {block_tokens}"
    num_rows, num_prompts = len(own_blocks), len(prompts)
    prompt_of_B = np.full(num_rows, -1, np.int32)
    blocks: list[int] = []
    members: list[int] = []
    shared: list[tuple[int, ...]] = []
    own: list[tuple[int, ...]] = []
    num_slots_B = np.zeros(num_rows, np.int32)
    prompt_tokens_B = np.zeros(2 * num_rows, np.int32)
    for number, prompt in enumerate(prompts):
        assert prompt.num_tokens <= len(prompt.blocks) * block_tokens, "a prompt is longer than its blocks"
        table, rows = len(blocks), list(prompt.rows)
        blocks += prompt.blocks
        prompt_of_B[rows] = number
        prompt_tokens_B[rows] = prompt.num_tokens
        num_slots_B[rows] = -(-prompt.num_tokens // split_keys)
        for first in range(0, len(rows), max_members):
            chosen = rows[first : first + max_members]
            for slot, first_key in enumerate(range(0, prompt.num_tokens, split_keys)):
                shared.append((len(members), len(chosen), table, first_key, number, num_rows, slot))
            members += chosen
    assert (prompt_of_B >= 0).all(), "a response of the batch has no prompt"
    own_table_B = np.zeros(num_rows, np.int32)
    for row, (numbers, num_tokens) in enumerate(zip(own_blocks, own_tokens, strict=True)):
        most = num_tokens + room_tokens
        assert num_tokens >= 1 and most <= len(numbers) * block_tokens, f"response {row} is longer than its blocks"
        own_table_B[row] = len(blocks)
        for first_key in range(0, most, split_keys):
            own.append((len(members), 1, len(blocks), first_key, num_prompts + row, row, int(num_slots_B[row])))
            num_slots_B[row] += 1
        blocks += numbers
        members.append(row)
    return PagedReads(
        block_tokens=block_tokens,
        split_keys=split_keys,
        blocks_F=np.asarray(blocks, np.int32),
        members_X=np.asarray(members, np.int32),
        shared_I=np.asarray(shared, np.int32).reshape(-1, len(ITEM_FIELDS)),
        own_I=np.asarray(own, np.int32).reshape(-1, len(ITEM_FIELDS)),
        lengths=np.asarray([*(prompt.num_tokens for prompt in prompts), *own_tokens], np.int32),
        own_table_B=own_table_B,
        prompt_tokens_B=prompt_tokens_B,
        num_slots_B=num_slots_B,
    )
