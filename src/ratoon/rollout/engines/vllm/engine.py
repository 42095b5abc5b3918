"""vLLM in the trainer's process: its own copy of the weights on the same device, replaced after each step."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.vllm.batch import VllmBatch
from ratoon.rollout.engines.vllm.refusals import check_sampling, check_settings
from ratoon.rollout.engines.worker import WorkerThread
from ratoon.rollout.errors import RolloutError
from ratoon.rollout.policy_weights import policy_stream
from ratoon.types import Prompt, RolloutGroup, SamplingParams
from ratoon.weight_sync import WeightProbe, WeightStream

if TYPE_CHECKING:
    from ratoon.rollout.engines.vllm.core import VllmCore


class VllmEngine(InProcessEngine[VllmBatch]):
    """A `RolloutEngine` over vLLM.

    Draws depend on a response's seed and on vLLM's kernels, whose rounding follows the batch: near-ties may fall
    otherwise in another batch. Responses in flight while weights change go on from their tokens, computed anew.
    """

    def __init__(self, config: RolloutConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """model: whose weights are served until `update_weights` gives others.

        Takes the seconds that vLLM needs to start. Raises UserError for what it cannot do exactly, RolloutError where
        it does not start.
        """
        check_settings(config, model)
        self._stream_dtype = model.dtype
        self.probe = WeightProbe("vLLM", max_mean_abs=config.vllm.max_probe_gap, limit_key="rollout.vllm.max_probe_gap")
        self._bucket_bytes = config.vllm.bucket_mib << 20
        self._level = config.vllm.sleep
        self._is_asleep = False
        self._has_room_for_weights = True
        """Taking memory back twice is an error of vLLM's."""

        self._has_weights = False
        weights = policy_stream(model, model.dtype)
        # One thread makes it and steps it: some of what CUDA and vLLM keep is a thread's own.
        worker = WorkerThread("ratoon-vllm")
        if model.device.type == "cuda":
            worker.submit(lambda: torch.cuda.set_device(model.device))
        try:
            self._core = worker.submit(lambda: _start(config, model)).result()
        except ImportError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM did not start: {type(error).__name__}: {error}") from error
        super().__init__(config, model, tokenizer, twin=model, batch=VllmBatch(self._core), worker=worker)
        self._worker.submit(lambda: self._load(weights, 0)).result()

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        begun: RolloutGroup | None = None,
        max_new_tokens: int | None = None,
    ) -> RolloutGroup:
        """See `RolloutEngine.generate`, and `VllmEngine` for the draws."""
        check_sampling(sampling)
        return await super().generate(
            prompt, group_size=group_size, sampling=sampling, step=step, begun=begun, max_new_tokens=max_new_tokens
        )

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """See `RolloutEngine.update_weights`.

        weights: a `WeightStream`, read once and in order, a bucket at a time. Any other mapping is only a sign that
        the model which the engine was built over has changed, and its weights are read.
        """
        self._check_open()
        stream = weights if isinstance(weights, WeightStream) else policy_stream(self._model, self._stream_dtype)
        await self._on_worker(lambda: self._load(stream, version), f"loading of weights of version {version}")

    async def score(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """See `ProbedEngine.score`. Waits for the forward pass in progress."""
        self._check_open()
        return await self._on_worker(lambda: self._core.score(token_ids), "scoring of the probe")

    async def pause(self) -> None:
        """See `RolloutEngine.pause`. With `rollout.vllm.sleep` vLLM gives its memory up until `resume`."""
        await super().pause()
        if self._level and not self._is_asleep:
            self._is_asleep, self._has_room_for_weights = True, False
            level = self._level
            if level == 2:
                self._has_weights = False
            await self._on_worker(lambda: self._core.sleep(level), "vLLM's falling asleep")

    async def resume(self) -> None:
        """See `RolloutEngine.resume`. Raises RolloutError where vLLM gave its weights up and got none since."""
        self._check_open()
        if not self._has_weights:
            raise RolloutError(
                "vLLM slept at level 2, which drops its weights, and was resumed before update_weights brought new ones"
            )
        if self._is_asleep:
            await self._on_worker(self._wake, "vLLM's waking up")
        await super().resume()

    @property
    def share_of_prompts_reused(self) -> float:
        """Of the prompt tokens of all requests so far, those that were in the cache: 0 to 1."""
        return self._batch.num_reused_tokens / max(self._batch.num_prompt_tokens, 1)

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._is_closed:
            return
        try:
            if self._is_asleep:
                await self._on_worker(self._wake, "vLLM's waking up")
        finally:
            await super().close()
            await asyncio.to_thread(self._core.close)

    def _load(self, stream: WeightStream, version: int) -> None:
        self._wake_weights()
        self._has_weights = False
        self._core.load(stream, self._bucket_bytes, version=version)
        self._has_weights = True
        self._stamp.version = version
        self._batch.weights_changed()

    def _wake(self) -> None:
        self._wake_weights()
        self._core.wake("kv_cache")
        self._is_asleep = False

    def _wake_weights(self) -> None:
        if not self._has_room_for_weights:
            self._core.wake("weights")
            self._has_room_for_weights = True


def _start(config: RolloutConfig, model: PreTrainedModel) -> "VllmCore":
    from ratoon.rollout.engines.vllm.core import VllmCore  # imports vLLM

    dtype = torch.float32 if config.vllm.dtype == "float32" else model.dtype
    return VllmCore(model, config.vllm, config.max_concurrent_responses, dtype)
