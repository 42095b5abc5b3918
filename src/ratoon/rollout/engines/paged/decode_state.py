"""What a decode step reads and writes on the GPU: tensors that stay where they are, so that graphs may repeat it."""

# Shape letters: R rows that there is room for, B rows that decode, V vocabulary, C channels, S steps, L layers, K
# experts per token.

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.attention.paged.decode import SPLIT_KEYS, DeviceReads, decode, write_keys
from ratoon.attention.paged.reads import PagedReads, ReadSizes
from ratoon.models.interface import is_batch_invariant
from ratoon.models.logits import float32_logits
from ratoon.models.settings import setting
from ratoon.ops.invariant.entry import score_tokens
from ratoon.ops.sampling.entry import draw_tokens
from ratoon.rollout.engines.paged.block_attention import LayerRows, PagedPass
from ratoon.rollout.engines.paged.block_cache import BlockCache, LayerCache
from ratoon.rollout.engines.paged.experts import RouteRecorder, why_not_recorded
from ratoon.rollout.engines.paged.invariant_attention import InvariantDecode
from ratoon.rollout.engines.paged.runner import Decoded, DecodeRows, Draws
from ratoon.rollout.engines.paged.step_graphs import StepGraphs


class KernelDecode:
    """An `Attention` of one row for each response, by our kernels."""

    def __init__(self, reads: DeviceReads) -> None:
        self._reads = reads

    def attend(self, cache: LayerCache, rows: LayerRows) -> Tensor:
        """See `Attention.attend`."""
        q_RHD, k_RHD, v_RHE = (x if x.stride(-1) == 1 else x.contiguous() for x in (rows.q_RHD, rows.k_RHD, rows.v_RHE))
        caches = cache.k_cache, cache.v_cache
        write_keys(k_RHD, v_RHE, *caches, self._reads)
        return decode(q_RHD, *caches, self._reads, rows.scoring, window=rows.window, sinks_H=rows.sinks_H)


class DecodeState:
    """The rows of one batch, from one token to the next without the host."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: BlockCache,
        room: ReadSizes,
        *,
        block_tokens: int,
        max_steps: int,
        routes: RouteRecorder | None = None,
    ) -> None:
        """For batches of up to `room`, and up to `max_steps` steps between two `load`s. `model` is attached.

        routes: watches the model.
        """
        device, is_cuda = model.device, model.device.type == "cuda"
        self._model = model
        self._reads = DeviceReads(room, block_tokens, SPLIT_KEYS, device)
        self._is_invariant = is_batch_invariant(model)
        self._pass = PagedPass(cache, (InvariantDecode if self._is_invariant else KernelDecode)(self._reads))
        # Token, position, key, tokens drawn before, and 1 for a row that is no padding.
        self._host_5R = torch.zeros(5, room.rows, dtype=torch.int64, pin_memory=is_cuda)
        self._host_temperature_R = torch.ones(room.rows, dtype=torch.float64, pin_memory=is_cuda)
        self._rows_5R = torch.zeros(5, room.rows, dtype=torch.int64, device=device)
        self._temperature_R = torch.ones(room.rows, dtype=torch.float64, device=device)
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.token_SR = torch.zeros(max_steps, room.rows, dtype=torch.int64, device=device)
        """What `drawn` drew since `load`."""

        self.logprob_SR = torch.zeros(max_steps, room.rows, dtype=torch.float32, device=device)
        self._routes = routes
        self.routes_SRLK: Tensor | None = None
        """Of the tokens that `drawn` fed since `load`."""

        if routes is not None:
            self.routes_SRLK = torch.zeros(
                max_steps, room.rows, *routes.shape_per_token, dtype=torch.int16, device=device
            )
        positions = setting(model.config.get_text_config(), "max_position_embeddings")
        self._last_position = torch.iinfo(torch.int64).max if positions is None else positions - 1
        records = not is_cuda or why_not_recorded(model) is None
        self.decoded = StepGraphs(self._decode, device, records=records)
        """Of a step that draws nothing."""

        self.drawn = StepGraphs(self._draw, device, records=records)
        """A step that draws each row's next token, and feeds it to the step behind it."""

    def clear(self) -> None:
        """Every row is padding, whose steps write no keys."""
        self._rows_5R.zero_()
        self._step_1.zero_()
        self._reads.clear()

    def load(self, rows: DecodeRows, draws: Draws | None, reads: PagedReads) -> None:
        """The rows' next tokens, without waiting for the GPU; what was loaded before must have run there."""
        num_rows = rows.token_B.size
        host_5R, temperature_R = self._host_5R.numpy(), self._host_temperature_R.numpy()
        host_5R[:, num_rows:] = 0
        host_5R[0, :num_rows] = rows.token_B
        host_5R[1, :num_rows] = rows.position_B
        host_5R[4, :num_rows] = 1
        if draws is not None:
            host_5R[2, :num_rows] = draws.key_B.view(np.int64)
            host_5R[3, :num_rows] = draws.num_drawn_B
            temperature_R[:num_rows] = draws.temperature_B
        self._rows_5R.copy_(self._host_5R, non_blocking=True)
        self._temperature_R.copy_(self._host_temperature_R, non_blocking=True)
        self._step_1.zero_()
        self._reads.load(reads)

    def _logits_of(self, size: int) -> Tensor:
        token_R, position_R = self._rows_5R[0, :size], self._rows_5R[1, :size]
        with torch.no_grad():
            return float32_logits(self._model, hidden_of(self._model, token_R, position_R, self._pass))

    def _decode(self, size: int) -> Decoded:
        logits_RV = self._logits_of(size)
        return Decoded(logits_RV, None if self._routes is None else self._routes.take())

    def _draw(self, size: int) -> None:
        token_R, position_R, key_R, num_drawn_R, is_row_R = self._rows_5R[:, :size]
        logits_RV, temperature_R = self._logits_of(size), self._temperature_R[:size]
        drawn_R, logprob_R = draw_tokens(logits_RV, temperature_R, key_R, num_drawn_R)
        if self._is_invariant:  # by the very code that the trainer runs
            logprob_R = score_tokens(logits_RV, drawn_R, temperature_R)
        self.token_SR[:, :size].index_copy_(0, self._step_1, drawn_R[None])
        self.logprob_SR[:, :size].index_copy_(0, self._step_1, logprob_R[None])
        if self._routes is not None and self.routes_SRLK is not None:
            self.routes_SRLK[:, :size].index_copy_(0, self._step_1, self._routes.take()[None])
        self._step_1 += 1
        token_R.copy_(drawn_R)
        # Tokens behind a response's end may stand behind the model's last position; they are drawn for nobody.
        position_R.add_(is_row_R).clamp_(max=self._last_position)
        num_drawn_R += is_row_R
        self._reads.own_lengths[:size] += is_row_R


def hidden_of(model: PreTrainedModel, token_R: Tensor, position_R: Tensor, paged_pass: PagedPass) -> Tensor:
    """[R, C] the last hidden states of a pass's rows."""
    paged_pass.begin()
    with torch.no_grad():
        output = model.base_model(
            input_ids=token_R[None], position_ids=position_R[None], use_cache=False, paged_pass=paged_pass.number
        )
    return output[0][0]
