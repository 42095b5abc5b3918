"""What the schedule asks of the model: two kinds of forward pass over a paged cache."""

# Shape letters: B responses that decode, U prompts they continue, X blocks of one table row, n tokens of one piece,
# V vocabulary, S steps, L layers of the model, K experts per token.

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
class Prefilled:
    """What came out of a prefill pass, on the model's device."""

    logits_UV: Tensor
    """float32, of the U pieces that want them, in their order."""

    routes: tuple[Tensor, ...] | None
    """[n, L, K] int16 of each piece, in their order: the experts chosen for its tokens, -1 in layers without experts.
    None from a runner that does not return them."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came out of a decode pass, on the model's device."""

    logits_BV: Tensor
    """float32."""

    routes_BLK: Tensor | None
    """int16, of the rows' tokens; see `Prefilled.routes`."""

    def first(self, num_rows: int) -> "Decoded":
        """Of the first rows alone."""
        routes_BLK = self.routes_BLK
        return Decoded(self.logits_BV[:num_rows], None if routes_BLK is None else routes_BLK[:num_rows])


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """S tokens of each row, one after another."""

    token_SB: NDArray[np.int64]
    logprob_SB: NDArray[np.float32]
    """Not finite where the logits were not."""

    routes_SBLK: NDArray[np.int16] | None
    """Of the tokens that they were drawn behind; see `Prefilled.routes`."""


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

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Prefilled:
        """Write the pieces' keys; no piece reads what another of the same pass writes."""
        ...

    def decode(self, rows: DecodeRows) -> Decoded:
        """Write the rows' keys."""
        ...

    def draw(self, rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
        """`num_steps` passes, each over the tokens that the one before drew; the last ones' keys are not written."""
        ...

    def weights_changed(self) -> None:
        """The model's parameters have other values, or are other tensors."""
        ...


def draw_in_turn(
    decode: Callable[[DecodeRows], Decoded], rows: DecodeRows, draws: Draws, num_steps: int
) -> DrawnTokens:
    """`Runner.draw` by its definition: the host draws from the logits of each pass."""
    tokens: list[NDArray[np.int64]] = []
    logprobs: list[NDArray[np.float32]] = []
    routes: list[NDArray[np.int16]] = []
    for step in range(num_steps):
        decoded = decode(rows)
        uniform_B = torch.from_numpy(uniform_draws(draws.key_B, draws.num_drawn_B + step))
        temperature_B = torch.from_numpy(draws.temperature_B)
        token_B, logprob_B = sample_tokens(decoded.logits_BV.cpu(), temperature_B, uniform_B)
        tokens.append(token_B.numpy())
        logprobs.append(logprob_B.numpy())
        if decoded.routes_BLK is not None:
            routes.append(decoded.routes_BLK.cpu().numpy())
        rows = rows.followed_by(tokens[-1])
    return DrawnTokens(np.stack(tokens), np.stack(logprobs), np.stack(routes) if routes else None)
