"""Responses in flight in vLLM: one request each, so that each has draws, a budget and an end of its own."""

import math
from collections.abc import Iterable
from typing import Protocol

from ratoon.rollout.drafts import GroupDraft, ResponseDraft
from ratoon.rollout.draws import request_seed
from ratoon.rollout.engines.stepping import StepReport, failure
from ratoon.rollout.engines.vllm.requests import NewTokens
from ratoon.rollout.errors import RolloutError
from ratoon.types import UserError


class Core(Protocol):
    """What a batch asks of `VllmCore`."""

    max_model_len: int

    @property
    def has_unfinished(self) -> bool: ...

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        eos_ids: list[int],
    ) -> None: ...

    def step(self) -> list[NewTokens]: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def forget_cache(self) -> None: ...


class VllmBatch:
    """A `Batch` whose forward passes are vLLM's. It schedules, and computes a group's prompt once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._running: dict[str, tuple[GroupDraft, ResponseDraft]] = {}
        self._num_requests = 0
        self._broken: Exception | None = None
        """What a step raised: vLLM's own state is not to be trusted after it."""

        self.num_prompt_tokens = 0
        """Of all requests so far, with the tokens that they went on from."""

        self.num_reused_tokens = 0
        """Of these, those that were not computed again."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check_fits(self, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int) -> None:
        """See `Batch.check_fits`."""
        longest, limit = num_prompt_tokens + max_response_tokens, self._core.max_model_len
        if longest > limit:
            raise UserError(
                f"prompt {prompt_id!r} has {num_prompt_tokens:,} tokens; with rollout.max_response_tokens="
                f"{max_response_tokens:,} that is {longest:,}, over rollout.vllm.max_model_len={limit:,}; raise it, "
                "lower the budget or drop the prompt"
            )

    def add(self, group: GroupDraft) -> None:
        """See `Batch.add`. A response that goes on is asked for with its tokens behind the prompt."""
        for draft in group.open_drafts:
            request_id = f"{group.prompt.id}-{self._num_requests}"
            self._num_requests += 1
            self._running[request_id] = (group, draft)
            if self._broken is not None:
                continue  # the next step says so
            tokens = [*group.prompt.token_ids.tolist(), *draft.token_ids]
            self.num_prompt_tokens += len(tokens)
            try:
                self._core.add(
                    request_id,
                    tokens,
                    temperature=draft.temperature,
                    seed=request_seed(draft.key, len(draft.token_ids)),
                    max_tokens=draft.num_left,
                    eos_ids=sorted(draft.ending.eos_ids),
                )
            except Exception as error:
                self._broken = error

    def step(self) -> StepReport:
        """See `Batch.step`. After a failure every group fails with its reason: vLLM is not stepped again."""
        if not self._running:
            return StepReport()
        try:
            if self._broken is not None:
                raise self._broken
            touched = self._take(self._core.step())
        except (RolloutError, UserError) as error:  # ours: vLLM itself is well
            return self._fail(error)
        except Exception as error:
            self._broken = error
            return self._fail(error)
        if not touched and not self._core.has_unfinished:
            lost = RolloutError(f"vLLM has nothing to do, but {len(self._running)} responses have not ended")
            return self._fail(lost)
        ended = {id(group): group for group in touched if group.is_complete}
        return StepReport(finished=tuple(ended.values()), made_progress=bool(touched))

    def withdraw(self, groups: Iterable[GroupDraft]) -> None:
        """See `Batch.withdraw`."""
        gone = {id(group) for group in groups}
        leaving = [name for name, (group, _) in self._running.items() if id(group) in gone]
        for name in leaving:
            del self._running[name]
        if leaving and self._broken is None:
            self._core.abort(leaving)

    def weights_changed(self) -> None:
        """Nothing to do: `VllmCore.load` has forgotten every key."""

    def forget_cache(self) -> None:
        """See `Batch.forget_cache`."""
        if self._broken is None:
            self._core.forget_cache()

    def _take(self, news: list[NewTokens]) -> list[GroupDraft]:
        """Give the tokens to their responses; the groups that got some."""
        touched, over = [], []
        for new in news:
            if new.request_id not in self._running:
                continue
            group, draft = self._running[new.request_id]
            if not draft.token_ids[draft.num_begun :]:
                self.num_reused_tokens += new.num_reused
            touched.append(group)
            _give(draft, new, group)
            if draft.finish_reason is not None:
                del self._running[new.request_id]
                if new.finish_reason is None:  # a stop string, or more tokens than were wanted
                    over.append(new.request_id)
            elif new.finish_reason is not None:
                raise RolloutError(
                    f"prompt {group.prompt.id!r}: vLLM ended a response after {len(draft.token_ids)} tokens by "
                    f"{new.finish_reason!r}, though neither its budget nor an end-of-sequence token did"
                )
        if over:
            self._core.abort(over)
        return touched

    def _fail(self, error: Exception) -> StepReport:
        groups = tuple({id(group): group for group, _ in self._running.values()}.values())
        self.withdraw(groups)
        return StepReport(failed=groups, error=failure(groups, error))


def _give(draft: ResponseDraft, new: NewTokens, group: GroupDraft) -> None:
    if len(new.logprobs) != len(new.token_ids):
        raise RolloutError(
            f"prompt {group.prompt.id!r}: vLLM gave {len(new.logprobs)} log-probs for {len(new.token_ids)} tokens"
        )
    for token, logprob in zip(new.token_ids, new.logprobs, strict=True):
        if not math.isfinite(logprob) and draft.temperature > 0:
            raise RolloutError(
                f"prompt {group.prompt.id!r}: vLLM drew token {token} with log-prob {logprob}; its weights or its "
                "kernels are broken"
            )
        if draft.take(token, logprob):
            return
