"""A runner without a model: it checks what is read against what was written, and its logits name the whole sequence."""

# Shape letters: B responses that decode, U prompts, V vocabulary.

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.rollout.drafts import PolicyStamp
from ratoon.rollout.engines.paged.runner import (
    Decoded,
    DecodeRows,
    DrawnTokens,
    Draws,
    Prefilled,
    PrefillPiece,
    draw_in_turn,
)

VOCAB = 29
UNWRITTEN = -1


def logits_after(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """[V]. Any other sequence has other logits."""
    seed = zlib.crc32(tokens.astype(np.int64).tobytes())
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


class FakeRunner:
    """A cache of token ids, positions and weights versions in place of keys."""

    def __init__(
        self, block_tokens: int, prefill_tokens: int, stamp: PolicyStamp, restarts: bool, steps_together: int
    ) -> None:
        self.block_tokens = block_tokens
        self.steps_together = steps_together
        self._prefill_tokens = prefill_tokens
        self._stamp = stamp
        self._restarts = restarts
        self.is_broken = False
        self.num_prefilled = 0
        self.resize(0)

    def resize(self, num_blocks: int) -> None:
        shape = (num_blocks, self.block_tokens)
        self._token, self._position, self._version = (np.full(shape, UNWRITTEN) for _ in range(3))

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Prefilled:
        self._break_if_asked()
        num_rows = sum(piece.token_ids.size for piece in pieces)
        assert 0 < num_rows <= self._prefill_tokens
        self.num_prefilled += num_rows
        past = [
            self._read(_cells_of(piece, self.block_tokens)[: piece.start], piece.num_prompt_keys) for piece in pieces
        ]
        logits = []
        for piece, tokens in zip(pieces, past, strict=True):
            self._write(_cells_of(piece, self.block_tokens)[piece.start :], piece.token_ids, piece.start)
            if piece.wants_logits:
                logits.append(logits_after(np.concatenate([tokens, piece.token_ids])))
        return Prefilled(torch.from_numpy(np.array(logits, np.float32).reshape(-1, VOCAB)), None)

    def decode(self, rows: DecodeRows) -> Decoded:
        self._break_if_asked()
        assert (np.diff(rows.prompt_of_B) >= 0).all() and np.unique(rows.prompt_of_B).size == len(rows.prompt_table_UX)
        prompts = [
            _cells(rows.prompt_table_UX[u], rows.num_prompt_keys_U[u], self.block_tokens)
            for u in range(len(rows.prompt_table_UX))
        ]
        cells = [
            np.concatenate([prompts[u], _cells(table, num_keys, self.block_tokens)])
            for u, table, num_keys in zip(rows.prompt_of_B, rows.own_table_BX, rows.num_own_keys_B, strict=True)
        ]
        past = [
            self._read(cells_of_row[:-1], num_prompt_keys)
            for cells_of_row, num_prompt_keys in zip(cells, rows.num_prompt_keys_U[rows.prompt_of_B], strict=True)
        ]
        for cells_of_row, token, position in zip(cells, rows.token_B, rows.position_B, strict=True):
            self._write(cells_of_row[-1:], np.array([token]), position)
        logits = [logits_after(np.append(tokens, token)) for tokens, token in zip(past, rows.token_B, strict=True)]
        return Decoded(torch.from_numpy(np.array(logits)), None)

    def draw(self, rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
        return draw_in_turn(self.decode, rows, draws, num_steps)

    def weights_changed(self) -> None:
        pass

    def _break_if_asked(self) -> None:
        if self.is_broken:
            self.is_broken = False
            raise MemoryError("asked to break")

    def _read(self, cells: NDArray[np.int64], num_prompt_keys: int) -> NDArray[np.int64]:
        """Tokens of the cells, which must hold one sequence from its beginning, each prompt of one version."""
        block, offset = cells.T
        assert self._position[block, offset].tolist() == list(range(len(cells)))
        versions = self._version[block, offset]
        assert np.unique(versions[:num_prompt_keys]).size <= 1
        # No key is computed from keys of later weights.
        assert (np.diff(versions) >= 0).all()
        assert not self._restarts or (versions == self._stamp.version).all()
        return self._token[block, offset]

    def _write(self, cells: NDArray[np.int64], tokens: NDArray[np.int64], start: int) -> None:
        block, offset = cells.T
        self._token[block, offset] = tokens
        self._position[block, offset] = np.arange(start, start + tokens.size)
        self._version[block, offset] = self._stamp.version


def _cells_of(piece: PrefillPiece, block_tokens: int) -> NDArray[np.int64]:
    return np.concatenate(
        [
            _cells(piece.prompt_blocks, piece.num_prompt_keys, block_tokens),
            _cells(piece.own_blocks, piece.num_own_keys, block_tokens),
        ]
    )


def _cells(blocks: Sequence[int] | NDArray[np.int32], num_keys: int, block_tokens: int) -> NDArray[np.int64]:
    """[num_keys, 2]: block and offset of each key."""
    index = np.arange(num_keys)
    table = np.asarray(blocks, np.int64)
    return np.stack([table[index // block_tokens], index % block_tokens], axis=1)
