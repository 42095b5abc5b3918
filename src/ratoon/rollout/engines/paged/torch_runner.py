"""The passes of a transformers model over a paged cache."""

# Shape letters: R rows of a pass, B rows that decode, U pieces that want logits, T keys of one piece, V vocabulary.

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.rollout.engines.layer_kinds import check_layers
from ratoon.rollout.engines.paged.block_attention import BlockCache, DecodeTables, PagedPass, PieceReads
from ratoon.rollout.engines.paged.runner import BLOCK_TOKENS, DecodeRows, PrefillPiece

Integers = NDArray[np.int32] | NDArray[np.int64]


class TorchRunner:
    """A `Runner` of a model with `block_attention`, in eval mode. Raises UserError for layers it cannot cache."""

    def __init__(self, model: PreTrainedModel, block_tokens: int = BLOCK_TOKENS) -> None:
        check_layers(model)
        self._model = model
        self.block_tokens = block_tokens
        self._cache = BlockCache(0, block_tokens)

    def resize(self, num_blocks: int) -> None:
        """See `Runner.resize`. The old tensors are freed first; the new ones are made by the first pass."""
        self._cache = BlockCache(num_blocks, self.block_tokens)

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Tensor:
        """See `Runner.prefill`."""
        reads: list[PieceReads] = []
        wanted: list[int] = []
        row = 0
        for piece in pieces:
            block_T, offset_T = self._cells(piece)
            end = row + piece.token_ids.size
            reads.append(PieceReads(row, end, self._to_device(block_T), self._to_device(offset_T)))
            if piece.wants_logits:
                wanted.append(end - 1)
            row = end
        sizes = [piece.token_ids.size for piece in pieces]
        return self._forward(
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([np.arange(piece.start, piece.num_keys) for piece in pieces]),
            PagedPass(
                self._cache,
                torch.cat([piece.block_T[-size:] for piece, size in zip(reads, sizes, strict=True)]),
                torch.cat([piece.offset_T[-size:] for piece, size in zip(reads, sizes, strict=True)]),
                tuple(reads),
            ),
            torch.tensor(wanted, dtype=torch.int64, device=self._model.device),
        )

    def decode(self, rows: DecodeRows) -> Tensor:
        """See `Runner.decode`."""
        last_B = rows.num_own_keys_B - 1
        block_B = rows.own_table_BX[np.arange(last_B.size), last_B // self.block_tokens]
        tables = DecodeTables.of(rows, self._model.device)
        paged_pass = PagedPass(
            self._cache, self._to_device(block_B), self._to_device(last_B % self.block_tokens), tables
        )
        return self._forward(rows.token_B, rows.position_B, paged_pass, logits_of=0)

    def _forward(
        self, token_R: Integers, position_R: Integers, paged_pass: PagedPass, logits_of: Tensor | int
    ) -> Tensor:
        """logits_of: indices of the rows whose logits are wanted; 0: of all. [rows wanted, V] float32."""
        with torch.no_grad():
            output = self._model(
                input_ids=self._to_device(token_R)[None],
                position_ids=self._to_device(position_R)[None],
                use_cache=False,
                logits_to_keep=logits_of,
                paged_pass=paged_pass,
            )
        return output.logits[0].float()

    def _cells(self, piece: PrefillPiece) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Block and offset of each of the piece's keys."""
        prompt_index, own_index = np.arange(piece.num_prompt_keys), np.arange(piece.num_own_keys)
        block_T = np.concatenate(
            [
                np.asarray(piece.prompt_blocks, np.int64)[prompt_index // self.block_tokens],
                np.asarray(piece.own_blocks, np.int64)[own_index // self.block_tokens],
            ]
        )
        return block_T, np.concatenate([prompt_index, own_index]) % self.block_tokens

    def _to_device(self, array: Integers) -> Tensor:
        return torch.from_numpy(array).to(self._model.device, torch.int64)
