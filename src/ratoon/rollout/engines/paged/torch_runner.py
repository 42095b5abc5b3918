"""The passes of a transformers model over a paged cache, in torch's own operations: for CPUs."""

# Shape letters: R rows of a pass, B rows that decode, U pieces that want logits, V vocabulary, C channels, L layers, K
# experts per token.

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.attention.transfer import to_device
from ratoon.rollout.engines.layer_kinds import check_layers
from ratoon.rollout.engines.paged.block_attention import Attention, PagedPass
from ratoon.rollout.engines.paged.block_cache import BlockCache
from ratoon.rollout.engines.paged.experts import RouteRecorder
from ratoon.rollout.engines.paged.gathered_decode import GatheredDecode
from ratoon.rollout.engines.paged.prefill import Prefill
from ratoon.rollout.engines.paged.runner import (
    Decoded,
    DecodeRows,
    DrawnTokens,
    Draws,
    Prefilled,
    PrefillPiece,
    draw_in_turn,
)
from ratoon.rollout.engines.paged.sizes import BLOCK_TOKENS


class TorchRunner:
    """A `Runner` of a model with `block_attention`, in eval mode. Raises UserError for layers it cannot cache."""

    steps_together = 1

    def __init__(
        self, model: PreTrainedModel, block_tokens: int = BLOCK_TOKENS, *, returns_routes: bool = False
    ) -> None:
        """returns_routes: raises UserError where `RouteRecorder` does."""
        check_layers(model)
        self._routes = RouteRecorder(model) if returns_routes else None
        self._model = model
        self.block_tokens = block_tokens
        self._cache = BlockCache(0, block_tokens)

    def resize(self, num_blocks: int) -> None:
        """See `Runner.resize`. The old tensors are freed first; the new ones are made by the first pass."""
        self._cache = BlockCache(num_blocks, self.block_tokens)

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Prefilled:
        """See `Runner.prefill`."""
        prefill = Prefill(pieces, self.block_tokens, self._model.device)
        wanted_U = np.array([prefill.last_row_of(piece) for piece in pieces if piece.wants_logits], np.int64)
        logits_UV = self._logits(prefill.token_ids_R, prefill.positions_R, prefill, wanted_U)
        return Prefilled(logits_UV, None if self._routes is None else prefill.of_pieces(pieces, self._routes.take()))

    def decode(self, rows: DecodeRows) -> Decoded:
        """See `Runner.decode`."""
        attention = GatheredDecode(rows, self.block_tokens, self._model.device)
        every_B = np.arange(rows.token_B.size)
        logits_BV = self._logits(rows.token_B, rows.position_B.astype(np.int64), attention, every_B)
        return Decoded(logits_BV, None if self._routes is None else self._routes.take())

    def draw(self, rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
        """See `Runner.draw`."""
        return draw_in_turn(self.decode, rows, draws, num_steps)

    def weights_changed(self) -> None:
        """Nothing to do: every pass reads the model's parameters."""

    def _logits(
        self,
        token_R: NDArray[np.int64],
        position_R: NDArray[np.int64],
        attention: Attention,
        wanted_U: NDArray[np.int64],
    ) -> Tensor:
        """[U, V] float32 of the rows that are wanted."""
        device = self._model.device
        paged_pass = PagedPass(self._cache, attention)
        with torch.no_grad():
            output = self._model(
                input_ids=to_device(token_R, device)[None],
                position_ids=to_device(position_R, device)[None],
                use_cache=False,
                logits_to_keep=to_device(wanted_U, device),
                paged_pass=paged_pass.number,
            )
        return output.logits[0].float()
