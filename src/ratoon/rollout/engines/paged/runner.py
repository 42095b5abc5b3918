"""What the schedule asks of the model: two kinds of forward pass over a paged cache."""

# Shape letters: B responses that decode, U prompts they continue, X blocks of one table row, n tokens of one piece,
# V vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BLOCK_TOKENS = 64
"""Tokens of one cache block. A response begins in a block of its own, so half a block is lost with each, and with each
prompt; smaller blocks make for longer tables and shorter reads."""


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Tokens of one prompt or one response that enter the cache, in one piece.

    They are the last n of its keys: what comes before them was written by earlier passes. Key i of a prompt is at
    offset i % block of its block i // block; key i of a response likewise in the response's own blocks. Positions count
    on: a response's key i is at position P + i.
    """

    token_ids: NDArray[np.int64]
    """[n], n at least 1."""

    prompt_blocks: Sequence[int]
    num_prompt_keys: int
    """The piece's own included where it belongs to the prompt."""

    own_blocks: Sequence[int] = ()
    num_own_keys: int = 0
    """0: the piece belongs to the prompt."""

    wants_logits: bool = False
    """Of its last token."""

    @property
    def num_keys(self) -> int:
        return self.num_prompt_keys + self.num_own_keys

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.num_keys - self.token_ids.size


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token of each response that decodes. It enters the cache as the last of the response's own keys.

    Rows that continue one prompt are adjacent, in the order of the prompts.
    """

    token_B: NDArray[np.int64]
    """[B], B at least 1."""

    prompt_of_B: NDArray[np.int32]
    """[B] in [0, U), not falling."""

    prompt_table_UX: NDArray[np.int32]
    """[U, X]. Blocks of each prompt in order; any block behind the last."""

    num_prompt_keys_U: NDArray[np.int32]

    own_table_BX: NDArray[np.int32]
    """[B, X]. Blocks of each response's own keys in order; any block behind the last."""

    num_own_keys_B: NDArray[np.int32]
    """[B], the row's own key included."""

    @property
    def position_B(self) -> NDArray[np.int32]:
        return self.num_prompt_keys_U[self.prompt_of_B] + self.num_own_keys_B - 1


class Runner(Protocol):
    """A model over a paged cache of its own. Calls come from one thread."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Drop the cache and make one of `num_blocks` blocks; 0 only frees it."""
        ...

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Tensor:
        """Write the pieces' keys; no piece reads what another of the same pass writes.

        Returns logits [U, V] float32 of the U pieces that want them, in their order.
        """
        ...

    def decode(self, rows: DecodeRows) -> Tensor:
        """Write the rows' keys. Returns logits [B, V] float32."""
        ...
