"""What a decode pass needs to know of each slot, as arrays: no pass loops over responses to gather it."""

# Shape letters: S slots, B slots that decode, U prompts, X blocks of one table row.

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.engines.paged.requests import NO_SLOT, Request
from ratoon.rollout.engines.paged.runner import DecodeRows


class SlotTables:
    """`num_slots` places, each empty or one request's."""

    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: list[Request | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._is_decoding_S = np.zeros(num_slots, np.bool_)
        self._token_S = np.zeros(num_slots, np.int64)
        self._num_own_keys_S = np.zeros(num_slots, np.int32)
        self._num_own_blocks_S = np.zeros(num_slots, np.int32)
        self._own_table_SX = np.zeros((num_slots, 1), np.int32)
        self._num_prompt_keys_S = np.zeros(num_slots, np.int32)
        self._prompt_table_SX = np.zeros((num_slots, 1), np.int32)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def enter(self, request: Request) -> None:
        """Give the request a slot; it does not decode yet."""
        assert request.slot == NO_SLOT, f"a request in slot {request.slot} enters again"
        slot = request.slot = self._free_slots.pop()
        self._requests[slot] = request

    def leave(self, request: Request) -> None:
        slot = request.slot
        assert slot != NO_SLOT and self._requests[slot] is request, f"slot {slot} is not the request's that leaves it"
        self._requests[slot] = None
        self._is_decoding_S[slot] = False
        self._free_slots.append(slot)
        request.slot = NO_SLOT

    def begin_decoding(self, request: Request) -> None:
        """The request's last token is fed by the next decode pass; all keys before it are in the cache."""
        slot, prompt = request.slot, request.prompt
        assert slot != NO_SLOT and prompt is not None, "a request without a slot decodes"
        self._is_decoding_S[slot] = True
        self._token_S[slot] = request.draft.token_ids[-1]
        self._num_own_keys_S[slot] = len(request.draft.token_ids)
        self._num_prompt_keys_S[slot] = prompt.num_tokens
        self._prompt_table_SX = _widened(self._prompt_table_SX, len(prompt.blocks))
        self._prompt_table_SX[slot, : len(prompt.blocks)] = prompt.blocks
        self._set_own_blocks(request)

    def own_blocks_grew(self, request: Request) -> None:
        self._set_own_blocks(request)

    def short_of_blocks(self, num_steps: int) -> list[Request]:
        """Those whose next `num_steps` keys have not all a block yet, the oldest first."""
        is_short_S = self._num_own_keys_S + (num_steps - 1) > self._num_own_blocks_S * self._block_tokens
        return sorted(self._at(np.flatnonzero(is_short_S & self._is_decoding_S)), key=lambda request: request.order)

    def decoding(self, num_steps: int) -> tuple[list[Request], DecodeRows] | None:
        """The requests that decode, and their rows in the same order, with tables for `num_steps` more keys; None where
        none does."""
        slots_B = np.flatnonzero(self._is_decoding_S)
        if slots_B.size == 0:
            return None
        # No two prompts share a block, so its first one names a prompt.
        first_B = self._prompt_table_SX[slots_B, 0]
        slots_B = slots_B[np.argsort(first_B, kind="stable")]
        _, first_row_U, prompt_of_B = np.unique(
            self._prompt_table_SX[slots_B, 0], return_index=True, return_inverse=True
        )
        slots_U = slots_B[first_row_U]
        num_prompt_keys_U = self._num_prompt_keys_S[slots_U]
        num_own_keys_B = self._num_own_keys_S[slots_B]
        rows = DecodeRows(
            token_B=self._token_S[slots_B],
            prompt_of_B=prompt_of_B.astype(np.int32),
            prompt_table_UX=self._prompt_table_SX[slots_U, : self._width(num_prompt_keys_U)],
            num_prompt_keys_U=num_prompt_keys_U,
            own_table_BX=self._own_table_SX[slots_B, : self._width(num_own_keys_B + (num_steps - 1))],
            num_own_keys_B=num_own_keys_B,
        )
        return self._at(slots_B), rows

    def advance(self, requests: list[Request], token_B: NDArray[np.int64], num_steps: int) -> None:
        """`num_steps` tokens were drawn; the last ones are the next to be fed."""
        slots_B = np.array([request.slot for request in requests])
        self._token_S[slots_B] = token_B
        self._num_own_keys_S[slots_B] += num_steps

    def _set_own_blocks(self, request: Request) -> None:
        slot, blocks = request.slot, request.own_blocks
        self._own_table_SX = _widened(self._own_table_SX, len(blocks))
        self._own_table_SX[slot, : len(blocks)] = blocks
        self._num_own_blocks_S[slot] = len(blocks)

    def _width(self, num_keys: NDArray[np.int32]) -> int:
        return -(-int(num_keys.max()) // self._block_tokens)

    def _at(self, slots_B: NDArray[np.int64]) -> list[Request]:
        requests = [self._requests[slot] for slot in slots_B.tolist()]
        assert None not in requests, "an empty slot decodes"
        return [request for request in requests if request is not None]


def _widened(table_SX: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """The table with at least `width` columns."""
    missing = width - table_SX.shape[1]
    if missing <= 0:
        return table_SX
    # At least doubled: a table that grows block by block is not copied for each.
    return np.pad(table_SX, ((0, 0), (0, max(missing, table_SX.shape[1]))))
