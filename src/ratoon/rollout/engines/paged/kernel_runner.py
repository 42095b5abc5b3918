"""The passes of a transformers model over a paged cache, by our kernels and in CUDA graphs."""

# Shape letters: R rows of a pass, B rows that decode, U pieces that want logits, V vocabulary, C channels, S steps, L
# layers, K experts per token.

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.attention.paged.decode import SPLIT_KEYS, max_members
from ratoon.attention.paged.reads import PagedReads, ReadSizes, build_reads
from ratoon.attention.transfer import to_device
from ratoon.models import model_shape
from ratoon.models.compiled import can_compile, compile_layers
from ratoon.models.interface import attachment_of, is_batch_invariant
from ratoon.models.logits import float32_logits
from ratoon.rollout.engines.layer_kinds import check_layers
from ratoon.rollout.engines.paged.block_attention import PagedPass
from ratoon.rollout.engines.paged.block_cache import BlockCache
from ratoon.rollout.engines.paged.decode_state import DecodeState, hidden_of
from ratoon.rollout.engines.paged.experts import RouteRecorder
from ratoon.rollout.engines.paged.invariant_attention import InvariantPrefill
from ratoon.rollout.engines.paged.prefill import Prefill
from ratoon.rollout.engines.paged.runner import Decoded, DecodeRows, DrawnTokens, Draws, Prefilled, PrefillPiece
from ratoon.rollout.engines.paged.sizes import BLOCK_TOKENS, STEPS_TOGETHER
from ratoon.rollout.engines.paged.step_graphs import StepGraphs, padded_rows


class KernelRunner:
    """A `Runner` of an attached model with `block_attention`, in eval mode, on one GPU.

    Layers without experts run compiled, but for batch-invariant models, and a decode step, drawing included, is one
    CUDA graph unless its experts need the host (`why_not_recorded`). Raises UserError for layers it cannot cache,
    ValueError for a model that is not attached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_rows: int,
        block_tokens: int = BLOCK_TOKENS,
        steps_together: int = STEPS_TOGETHER,
        *,
        returns_routes: bool = False,
    ) -> None:
        """max_rows: most responses of one pass. returns_routes: raises UserError where `RouteRecorder` does."""
        check_layers(model)
        attachment_of(model)
        self._model = model
        self.block_tokens = block_tokens
        self.steps_together = steps_together
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        self._max_members = max_members(num_heads // (getattr(config, "num_key_value_heads", None) or num_heads))
        self._cache = BlockCache(0, block_tokens)
        most_rows = padded_rows(max_rows)
        # For common batches; what needs more gets more, and records its graphs anew.
        self._room = ReadSizes(
            rows=most_rows,
            prompts=most_rows,
            blocks=32 * most_rows,
            shared_items=2 * most_rows,
            own_items=2 * most_rows,
            slots=8,
        )
        self._routes = RouteRecorder(model) if returns_routes else None
        self._state: DecodeState | None = None
        self._places: list[int] = []
        self._is_invariant = is_batch_invariant(model)
        # As in training: compiled experts have not been measured.
        is_dense = not model_shape(model.config).num_experts
        if model.device.type == "cuda" and is_dense and can_compile(model) and not self._is_invariant:
            compile_layers(model)

    def resize(self, num_blocks: int) -> None:
        """See `Runner.resize`. The old tensors are freed first; the new ones are made by the first pass."""
        self._state = None
        self._cache = BlockCache(num_blocks, self.block_tokens)

    def weights_changed(self) -> None:
        """See `Runner.weights_changed`. Graphs read parameters where they were when they were recorded."""
        if self._places != _places(self._model):
            self._state = None

    def prefill(self, pieces: Sequence[PrefillPiece]) -> Prefilled:
        """See `Runner.prefill`."""
        device = self._model.device
        prefill = (InvariantPrefill if self._is_invariant else Prefill)(pieces, self.block_tokens, device)
        wanted_U = np.array([prefill.last_row_of(piece) for piece in pieces if piece.wants_logits], np.int64)
        token_R, position_R = (to_device(x_R, device) for x_R in (prefill.token_ids_R, prefill.positions_R))
        hidden_RC = hidden_of(self._model, token_R, position_R, PagedPass(self._cache, prefill))
        with torch.no_grad():
            logits_UV = float32_logits(self._model, hidden_RC[to_device(wanted_U, device)])
        return Prefilled(logits_UV, None if self._routes is None else prefill.of_pieces(pieces, self._routes.take()))

    def decode(self, rows: DecodeRows) -> Decoded:
        """See `Runner.decode`. The next call overwrites what this one returns."""
        size, state = self._loaded(rows, None, num_steps=1, records=lambda state: state.decoded)
        return state.decoded(size).first(rows.token_B.size)

    def draw(self, rows: DecodeRows, draws: Draws, num_steps: int) -> DrawnTokens:
        """See `Runner.draw`. Waits for the GPU at its end."""
        size, state = self._loaded(rows, draws, num_steps=num_steps, records=lambda state: state.drawn)
        for _ in range(num_steps):
            state.drawn(size)

        def on_host(x_SR: Tensor) -> NDArray[Any]:
            return x_SR[:num_steps, : rows.token_B.size].cpu().numpy()

        routes_SRLK = state.routes_SRLK
        return DrawnTokens(
            on_host(state.token_SR), on_host(state.logprob_SR), None if routes_SRLK is None else on_host(routes_SRLK)
        )

    def _loaded(
        self,
        rows: DecodeRows,
        draws: Draws | None,
        *,
        num_steps: int,
        records: Callable[[DecodeState], StepGraphs[Any]],
    ) -> tuple[int, DecodeState]:
        """The state with these rows, and the size that they run as, recorded."""
        reads = build_reads(
            rows.prompt_of_B,
            rows.prompt_table_UX,
            rows.num_prompt_keys_U,
            rows.own_table_BX,
            rows.num_own_keys_B,
            block_tokens=self.block_tokens,
            split_keys=SPLIT_KEYS,
            max_members=self._max_members,
            room_tokens=num_steps - 1,
        )
        state = self._state_for(reads)
        size = padded_rows(rows.token_B.size)
        graphs = records(state)
        if not graphs.is_ready(size):
            state.clear()
            graphs.record(size)
        state.load(rows, draws, reads)
        return size, state

    def _state_for(self, reads: PagedReads) -> DecodeState:
        if self._state is not None and reads.sizes.fit_in(self._room):
            return self._state
        self._state = None  # frees its tensors before new ones are made
        self._room = self._room.grown(reads.sizes)
        self._places = _places(self._model)
        self._state = DecodeState(
            self._model,
            self._cache,
            self._room,
            block_tokens=self.block_tokens,
            max_steps=self.steps_together,
            routes=self._routes,
        )
        return self._state


def _places(model: PreTrainedModel) -> list[int]:
    """Where in memory the model's numbers are."""
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
