"""What the schedule asks of the model: two kinds of forward pass over a paged cache."""

# Shape letters: B responses that decode, U prompts they continue, X blocks of one table row, n tokens of one piece,
# V vocabulary, S steps.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.draws import sample_tokens, uniform_draws


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

    Rows that continue one prompt are adjacent, in the order of the prompts. Own tables have room for as many tokens
    as are drawn together.
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

    def followed_by(self, token_B: NDArray[np.int64]) -> "DecodeRows":
        """The rows of the pass after this one."""
        return replace(self, token_B=token_B, num_own_keys_B=self.num_own_keys_B + 1)


@dataclass(frozen=True, slots=True)
class Draws:
    """From which distribution, and by which stream of draws, each row's next tokens come. None is truncated."""

    key_B: NDArray[np.uint64]
    num_drawn_B: NDArray[np.int64]
    """Tokens the response has: the stream's position."""

    temperature_B: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """S tokens of each row, one after another."""

    token_SB: NDArray[np.int64]
    logprob_SB: NDArray[np.float32]
    """Not finite where the logits were not."""


class Runner(Protocol):
    """A model over a paged cache of its own. Calls come from one thread."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        ...

    @property
    def steps_together(self) -> int:
        """Tokens that are best drawn by one call of `draw`: more cost the responses that end among them."""
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

    def draw(self, rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
        """`num_steps` passes, each over the tokens that the one before drew; the last ones' keys are not written."""
        ...

    def weights_changed(self) -> None:
        """The model's parameters have other values, or are other tensors."""
        ...


def draw_in_turn(decode: Callable[[DecodeRows], Tensor], rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
    """`Runner.draw` by its definition: the host draws from the logits of each pass."""
    tokens: list[NDArray[np.int64]] = []
    logprobs: list[NDArray[np.float32]] = []
    for step in range(num_steps):
        logits_BV = decode(rows)
        uniform_B = torch.from_numpy(uniform_draws(draws.key_B, draws.num_drawn_B + step))
        temperature_B = torch.from_numpy(draws.temperature_B)
        token_B, logprob_B = sample_tokens(logits_BV.cpu(), temperature_B, uniform_B)
        tokens.append(token_B.numpy())
        logprobs.append(logprob_B.numpy())
        rows = rows.followed_by(tokens[-1])
    return DrawnTokens(np.stack(tokens), np.stack(logprobs))
