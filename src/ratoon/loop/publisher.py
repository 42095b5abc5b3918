"""After each step the engine has the new weights; one with weights of its own is asked to prove it."""

# Shape letters: M scored tokens.

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.layout import pack_documents
from ratoon.models import forward_logprobs
from ratoon.models.sharding import refresh_copy
from ratoon.rollout import RolloutConfig, RolloutEngine
from ratoon.rollout.policy_weights import policy_stream
from ratoon.rollout.probing import ProbedEngine
from ratoon.weight_sync import ProbeGap, ProbeScores, probe_tokens, publish


class Publisher:
    """One policy and the engine that samples from it. All ranks call it together."""

    def __init__(
        self,
        config: RolloutConfig,
        model: PreTrainedModel,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampled: PreTrainedModel,
    ) -> None:
        """sampled: the whole model that the engine samples from: `model`, or a copy where that is cut over ranks."""
        self._config = config
        self._model = model
        self._engine = engine
        self._sampled = sampled
        vocab_size = model.config.get_text_config().vocab_size
        self._probe_tokens = probe_tokens(tokenizer, vocab_size) if isinstance(engine, ProbedEngine) else None
        self._sleeps = config.engine == "vllm" and config.vllm.sleep > 0
        self._gap: ProbeGap | None = None

    async def publish(self, version: int) -> None:
        """Raises TimeoutError where the engine does not take the weights in time, WeightSyncError where it then scores
        otherwise than the trainer does."""
        self.refresh_sampled()
        if isinstance(self._engine, ProbedEngine):
            weights = policy_stream(self._model, self._sampled.dtype)
        else:
            weights = {name: tensor.detach() for name, tensor in self._sampled.state_dict().items()}
        await publish(weights, version, [self._engine], timeout_s=self._config.timeout_s)
        if self._sleeps:
            await self._engine.resume()
        await self._check(version)

    async def give_memory(self) -> None:
        """The engine gives its memory to the trainer until the next `publish`, where the recipe says so."""
        if self._sleeps:
            await self._engine.pause()

    def refresh_sampled(self) -> None:
        """Gives the whole copy, where there is one, the weights of now."""
        if self._sampled is not self._model:
            refresh_copy(self._sampled, self._model)

    def metrics(self) -> dict[str, float]:
        """Of the last `publish`; empty for engines that share the trainer's weights."""
        if self._gap is None:
            return {}
        return {"weight_probe_gap_mean": self._gap.mean_abs, "weight_probe_gap_max": self._gap.max_abs}

    async def _check(self, version: int) -> None:
        if self._probe_tokens is None or not isinstance(self._engine, ProbedEngine):
            return
        engine = ProbeScores(version, await self._engine.score(self._probe_tokens))
        self._gap = self._engine.probe.check(engine, self._trainer_scores(version))

    @torch.no_grad()
    def _trainer_scores(self, version: int) -> ProbeScores:
        assert self._probe_tokens is not None, "an engine is probed"
        was_training = self._model.training
        self._model.eval()
        try:
            logprobs_M, _ = forward_logprobs(self._model, pack_documents([self._probe_tokens.tolist()]))
        finally:
            self._model.train(was_training)
        return ProbeScores(version, logprobs_M.double().cpu().numpy().astype(np.float64))
