"""The in-process engine: a batch of responses on the trainer's own weights, stepped by whoever waits for them."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.models.settings import setting
from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.draft_maker import DraftMaker, check_prompt
from ratoon.rollout.drafts import GroupDraft, PolicyStamp
from ratoon.rollout.engines.shared_weights import share_again
from ratoon.rollout.engines.stepping import Batch, StepReport
from ratoon.rollout.engines.worker import WorkerThread
from ratoon.rollout.errors import RolloutError, RolloutStalledError
from ratoon.types import Prompt, RolloutGroup, SamplingParams, UserError

Result = TypeVar("Result")
BatchT = TypeVar("BatchT", bound=Batch)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One pending `generate`."""

    draft: GroupDraft
    done: asyncio.Future[RolloutGroup]


class InProcessEngine(Generic[BatchT]):
    """A `RolloutEngine` in this process.

    It generates with a second module tree over the model's own parameters, so the trainer's mode, attention
    implementation and gradients are never touched. Forward passes run on a thread of the engine's, and one task of the
    caller's event loop asks for them, one at a time, while any `generate` is pending: between two of them responses
    join, leave, and see new weights. Nothing runs, and no task is left, when nothing is pending.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        twin: PreTrainedModel,
        batch: BatchT,
        worker: WorkerThread | None = None,
    ) -> None:
        """twin: `twin_of` the model. batch: runs it. worker: the thread that made the batch, where that matters."""
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._twin = twin
        self._stamp = PolicyStamp()
        self._batch = batch
        self._drafts = DraftMaker.of(config, model, tokenizer, self._stamp)
        self._worker = worker or WorkerThread("ratoon-rollout")
        if model.device.type == "cuda":
            # A new thread begins with the first GPU, which may be another rank's.
            self._worker.submit(lambda: torch.cuda.set_device(model.device))
        self._calls: dict[int, _Call] = {}
        self._driver: asyncio.Task[None] | None = None
        self._is_paused = False
        self._is_closed = False
        self._last_progress = time.monotonic()

    @property
    def policy_version(self) -> int:
        return self._stamp.version

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
        """See `RolloutEngine.generate`. Waits for its own future, which the driver task resolves."""
        self._check_open()
        self._check_request(prompt, group_size, sampling)
        draft = self._drafts.make(
            prompt,
            group_size=group_size,
            sampling=sampling,
            step=step,
            begun=begun,
            max_new_tokens=max_new_tokens,
            vocab_size=self._num_embeddings,
        )
        if draft.is_complete:
            return draft.group(self._tokenizer)
        call = _Call(draft, asyncio.get_running_loop().create_future())
        self._calls[id(draft)] = call
        self._worker.submit(lambda: self._batch.add(draft))
        self._drive()
        try:
            return await self._watch(call)
        finally:
            if self._calls.pop(id(draft), None) is not None:
                self._worker.submit(lambda: self._batch.withdraw([draft]))

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """See `RolloutEngine.update_weights`. The trainer's tensors are shared, so `weights` is not read; a model whose
        parameters were replaced by others since is followed."""
        self._check_open()

        def adopt() -> None:
            share_again(self._model, self._twin)
            self._stamp.version = version
            self._batch.weights_changed()

        await self._on_worker(adopt, "new weights")

    async def pause(self) -> None:
        """See `RolloutEngine.pause`. Waits for the worker to reach the end of its queue."""
        self._check_open()
        self._is_paused = True
        await self._on_worker(lambda: None, "pause")

    async def resume(self) -> None:
        """See `RolloutEngine.resume`. Starts the driver task where calls are pending."""
        self._check_open()
        self._is_paused = False
        self._last_progress = time.monotonic()
        self._drive()

    async def abort(self) -> None:
        """See `RolloutEngine.abort`. Waits for the worker to withdraw every response; then resolves every call."""
        calls = list(self._calls.values())
        drafts = [call.draft for call in calls]

        def stop() -> list[RolloutGroup]:
            self._batch.withdraw(drafts)
            return [draft.group(self._tokenizer) for draft in drafts]

        for call, group in zip(calls, await self._on_worker(stop, "abort"), strict=True):
            self._resolve(call.draft, group)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Waits for the worker's queue and for the thread's end."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.abort()
            await self._on_worker(self._batch.forget_cache, "close")
        except RolloutStalledError:
            self._worker.close(0.0)  # should the pass return after all, its thread ends
            raise
        if not self._worker.close(self._config.timeout_s):
            raise RolloutStalledError(f"the rollout thread did not end within {self._config.timeout_s:g} s")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("the rollout engine is closed; build another one with build_engine")

    def _check_request(self, prompt: Prompt, group_size: int, sampling: SamplingParams) -> None:
        check_prompt(prompt, group_size, self._num_embeddings)
        positions = setting(self._model.config.get_text_config(), "max_position_embeddings")
        longest = prompt.num_tokens + sampling.max_response_tokens
        if positions is not None and longest > positions:
            raise UserError(
                f"prompt {prompt.id!r} has {prompt.num_tokens:,} tokens; with rollout.max_response_tokens="
                f"{sampling.max_response_tokens:,} that is {longest:,}, over the model's {positions:,} positions; "
                "lower one of them or drop the prompt"
            )
        self._batch.check_fits(prompt.id, prompt.num_tokens, sampling.max_response_tokens)

    @property
    def _num_embeddings(self) -> int:
        embedding = self._model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor), "the input embedding is a table of token ids"
        return embedding.shape[0]

    def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        is_driving = self._driver is not None and not self._driver.done() and self._driver.get_loop() is loop
        if self._calls and not self._is_paused and not is_driving:
            self._last_progress = time.monotonic()
            self._driver = loop.create_task(self._run_batch(), name="ratoon-rollout-driver")

    async def _run_batch(self) -> None:
        """Consumes pending calls; waits for one forward pass at a time; ends when none is pending, or on a pause."""
        while self._calls and not self._is_paused:
            try:
                report = await asyncio.wrap_future(self._worker.submit(self._step))
            except Exception as error:  # a defect of the engine's own: it ends the calls, not the engine
                wrapped = RolloutError(f"the rollout engine failed: {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                pending = [call.draft for call in self._calls.values()]
                self._worker.submit(lambda drafts=pending: self._batch.withdraw(drafts))
                for draft in pending:
                    self._resolve(draft, wrapped)
                return
            self._deliver(*report)

    def _step(self) -> tuple[StepReport, list[RolloutGroup]]:
        report = self._batch.step()
        return report, [draft.group(self._tokenizer) for draft in report.finished]

    def _deliver(self, report: StepReport, groups: list[RolloutGroup]) -> None:
        if report.made_progress or report.failed:
            self._last_progress = time.monotonic()
        for draft, group in zip(report.finished, groups, strict=True):
            self._resolve(draft, group)
        for draft in report.failed:
            assert report.error is not None, "a step that failed responses gives its reason"
            self._resolve(draft, report.error)

    def _resolve(self, draft: GroupDraft, result: RolloutGroup | RolloutError | UserError) -> None:
        call = self._calls.pop(id(draft), None)
        if call is None or call.done.done():
            return
        if isinstance(result, RolloutGroup):
            call.done.set_result(result)
            return
        # One error object cannot be raised in several tasks: each raise would add to its traceback.
        error = type(result)(*result.args)
        error.__cause__ = result.__cause__ or result
        call.done.set_exception(error)

    async def _watch(self, call: _Call) -> RolloutGroup:
        """The call's result; RolloutStalledError when no response of the engine moves for `timeout_s`."""
        since = time.monotonic()
        while True:
            idle_since = max(since, self._last_progress)
            remaining_s = idle_since + self._config.timeout_s - time.monotonic()
            if remaining_s <= 0 and not call.done.done():
                raise self._stalled(call, time.monotonic() - idle_since)
            done, _ = await asyncio.wait([call.done], timeout=max(remaining_s, 0.0))
            if done:
                return call.done.result()

    def _stalled(self, call: _Call, idle_s: float) -> RolloutStalledError:
        draft = call.draft
        waits_for = (
            "the engine is paused and was not resumed"
            if self._is_paused
            else "a forward pass of the model does not return"
        )
        num_open = sum(response.finish_reason is None for response in draft.drafts)
        return RolloutStalledError(
            f"prompt {draft.prompt.id!r}: {num_open} of {len(draft.drafts)} responses are unfinished after "
            f"{draft.num_tokens} tokens, and no token appeared for {idle_s:.1f} s "
            f"(rollout.timeout_s={self._config.timeout_s:g}): {waits_for}; {len(self._calls)} prompts are pending"
        )

    async def _on_worker(self, call: Callable[[], Result], purpose: str) -> Result:
        future = asyncio.wrap_future(self._worker.submit(call))
        try:
            return await asyncio.wait_for(future, self._config.timeout_s)
        except TimeoutError:
            raise RolloutStalledError(
                f"{purpose} waited {self._config.timeout_s:g} s (rollout.timeout_s) for a forward pass of the model "
                "that does not return"
            ) from None
