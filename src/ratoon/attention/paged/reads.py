"""Which blocks the new token of each response reads: work for the kernels, built on the host when lengths cross blocks.

A response reads its prompt, in blocks that its siblings read too, and its own tokens. Both are cut at fixed numbers of
keys from their first, whatever else is in the batch, so that a response's sums do not depend on its company.
"""

# Shape letters: B responses, U prompts, X blocks of one table row, I items, F block numbers of all tables.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = ("first_member", "num_members", "table", "first_key", "length", "slot")
"""Columns of an item: members are responses `first_member` and its neighbours; block numbers of its keys are
`blocks[table:]`; its keys end with the split or with `lengths[length]`; its sums go to `slot` of each member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSizes:
    """How much a batch's reads hold, or a device's buffers have room for."""

    rows: int
    prompts: int
    blocks: int
    shared_items: int
    own_items: int
    slots: int

    def fit_in(self, room: "ReadSizes") -> bool:
        return self == self.joined(room, min)

    def grown(self, sizes: "ReadSizes") -> "ReadSizes":
        """Room for both, in powers of two where it was not enough: who builds on sizes builds rarely."""
        return self.joined(sizes, lambda room, wanted: room if wanted <= room else 1 << (wanted - 1).bit_length())

    def joined(self, other: "ReadSizes", join: Callable[[int, int], int]) -> "ReadSizes":
        return ReadSizes(**{name: join(getattr(self, name), getattr(other, name)) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedReads:
    """int32 arrays on the host; what changes from token to token (`own_tokens_B`) is advanced on the device."""

    block_tokens: int
    split_keys: int

    blocks_F: NDArray[np.int32]

    shared_I: NDArray[np.int32]
    """[I, 6]: items of prompts. `length` counts prompts, which begin at position 0."""

    own_I: NDArray[np.int32]
    """[I, 6]: items of own tokens, one member each. `length` counts responses."""

    prompt_tokens_U: NDArray[np.int32]

    own_tokens_B: NDArray[np.int32]
    """The new one included."""

    own_table_B: NDArray[np.int32]
    """[B] where a response's own blocks begin in `blocks`."""

    prompt_table_B: NDArray[np.int32]
    """[B] where its prompt's blocks begin."""

    first_position_B: NDArray[np.int32]
    """[B] the position of each response's first own token."""

    num_slots_B: NDArray[np.int32]

    @property
    def sizes(self) -> ReadSizes:
        return ReadSizes(
            rows=self.own_tokens_B.size,
            prompts=self.prompt_tokens_U.size,
            blocks=self.blocks_F.size,
            shared_items=len(self.shared_I),
            own_items=len(self.own_I),
            slots=int(self.num_slots_B.max(initial=1)),
        )


def build_reads(
    prompt_of_B: NDArray[np.int32],
    prompt_table_UX: NDArray[np.int32],
    prompt_tokens_U: NDArray[np.int32],
    own_table_BX: NDArray[np.int32],
    own_tokens_B: NDArray[np.int32],
    *,
    block_tokens: int,
    split_keys: int,
    max_members: int,
    room_tokens: int = 0,
) -> PagedReads:
    """prompt_of_B: not falling, each prompt has a response. Tables: blocks in order; any number behind the last.

    own_tokens_B: of each response, the new token included. max_members: of one item; more siblings take several.
    room_tokens: by how many tokens responses may grow before this is built anew; the tables have their blocks.
    """
    assert split_keys % block_tokens == 0, f"splits of {split_keys} keys are not whole blocks of {block_tokens}"
    (num_prompts, prompt_width), (num_rows, own_width) = prompt_table_UX.shape, own_table_BX.shape
    most_B = own_tokens_B + room_tokens
    assert prompt_tokens_U.max(initial=0) <= prompt_width * block_tokens, "a prompt is longer than its blocks"
    assert most_B.max(initial=0) <= own_width * block_tokens, "a response is longer than its blocks"
    members_U = np.bincount(prompt_of_B, minlength=num_prompts)
    assert (members_U > 0).all() and (np.diff(prompt_of_B) >= 0).all(), "responses do not stand in their prompts' order"
    splits_U, splits_B = -(-prompt_tokens_U // split_keys), -(-most_B // split_keys)
    own_table_B = prompt_table_UX.size + np.arange(num_rows) * own_width
    row_I, split_I = _repeated(splits_B)
    slot_I = splits_U[prompt_of_B[row_I]] + split_I
    own = (row_I, np.ones_like(row_I), own_table_B[row_I], split_I * split_keys, row_I, slot_I)
    return PagedReads(
        block_tokens=block_tokens,
        split_keys=split_keys,
        blocks_F=np.concatenate([prompt_table_UX.ravel(), own_table_BX.ravel()]),
        shared_I=_shared_items(members_U, splits_U, prompt_width, split_keys, max_members),
        own_I=np.stack(own, axis=1).astype(np.int32),
        prompt_tokens_U=prompt_tokens_U,
        own_tokens_B=own_tokens_B,
        own_table_B=own_table_B.astype(np.int32),
        prompt_table_B=(prompt_of_B * prompt_width).astype(np.int32),
        first_position_B=prompt_tokens_U[prompt_of_B],
        num_slots_B=(splits_U[prompt_of_B] + splits_B).astype(np.int32),
    )


def _shared_items(
    members_U: NDArray[np.int64], splits_U: NDArray[np.int32], prompt_width: int, split_keys: int, max_members: int
) -> NDArray[np.int32]:
    """[I, 6]: each split of each prompt, once for every `max_members` of its responses."""
    prompt_I, index_I = _repeated(splits_U * -(-members_U // max_members))
    chunk_I, split_I = np.divmod(index_I, splits_U[prompt_I])
    before_I = chunk_I * max_members
    first_member_I = (np.cumsum(members_U) - members_U)[prompt_I] + before_I
    num_members_I = np.minimum(members_U[prompt_I] - before_I, max_members)
    items = (first_member_I, num_members_I, prompt_I * prompt_width, split_I * split_keys, prompt_I, split_I)
    return np.stack(items, axis=1).astype(np.int32)


def _repeated(counts: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each index as often as its count says, and which of these times it is."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
