"""The responses in flight: who is admitted, one forward pass at a time, and who is done.

Everything here runs on the engine's one thread.
"""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from ratoon.rollout.drafts import GroupDraft, ResponseDraft
from ratoon.rollout.engines.cache_budget import BLOCK_TOKENS, CacheLayout
from ratoon.rollout.engines.continuous_batching import SampledRequest, build_processor
from ratoon.rollout.engines.layer_kinds import check_layers
from ratoon.rollout.engines.stepping import StepReport, failure
from ratoon.rollout.errors import RolloutError

_GROWTH = 1.25
"""A cache that must grow grows by at least this, so that ever longer prompts do not rebuild it each step."""


@dataclass(slots=True, eq=False)
class _Share:
    """Responses of one group that were admitted together and share their prompt's blocks."""

    group: GroupDraft
    drafts: tuple[ResponseDraft, ...]
    request_ids: tuple[str, ...]
    shared_blocks: int
    blocks_per_response: int

    @property
    def num_open(self) -> int:
        return sum(draft.finish_reason is None for draft in self.drafts)

    @property
    def reserved_blocks(self) -> int:
        num_open = self.num_open
        return self.shared_blocks + num_open * self.blocks_per_response if num_open else 0


@dataclass(slots=True, eq=False)
class _Waiting:
    """Responses of one group that can share their prompt's blocks: those without a token, or a single one that has."""

    group: GroupDraft
    drafts: tuple[ResponseDraft, ...]
    num_admitted: int = 0

    @property
    def num_left(self) -> int:
        return len(self.drafts) - self.num_admitted


class GenerationBatch:
    """Admits groups first come, first served, when every block they may need is free: nothing is ever preempted."""

    def __init__(self, model: PreTrainedModel, max_concurrent_responses: int, cache_tokens: int | None) -> None:
        """model: in eval mode, with `paged_attention`."""
        self.layout = cache_layout(model)
        self._model = model
        self._max_concurrent_responses = max_concurrent_responses
        self._cache_tokens = cache_tokens
        self._processor: ContinuousBatchProcessor | None = None
        self._num_blocks = 0
        self._longest_request = 0
        self._waiting: deque[_Waiting] = deque()
        self._shares: list[_Share] = []
        self._num_requests = 0

    @property
    def num_running(self) -> int:
        return sum(share.num_open for share in self._shares)

    def check_fits(self, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise UserError where `cache_tokens` cannot hold even one response."""
        if self._cache_tokens is not None:
            self.layout.check_fits(self._cache_tokens, prompt_id, num_prompt_tokens, max_response_tokens)

    def add(self, group: GroupDraft) -> None:
        """See `Batch.add`. A response that goes on reads its prompt anew with its own tokens, in blocks of its own."""
        begun = [draft for draft in group.open_drafts if draft.token_ids]
        fresh = tuple(draft for draft in group.open_drafts if not draft.token_ids)
        self._waiting.extend(_Waiting(group, (draft,)) for draft in begun)
        if fresh:
            self._waiting.append(_Waiting(group, fresh))

    def step(self) -> StepReport:
        """Admit what fits, run one forward pass, and hand out the groups that are complete."""
        try:
            self._admit()
            if not self._shares:
                return StepReport()
            self._forward()
        except Exception as error:  # reported with the groups it ends; the next group meets a fresh cache
            return self._fail(error)
        open_shares = [share for share in self._shares if share.num_open]
        ended = {id(share.group): share.group for share in self._shares if not share.num_open}
        self._shares = open_shares
        finished = tuple(group for group in ended.values() if group.is_complete)
        return StepReport(finished=finished, made_progress=True)

    def withdraw(self, groups: Iterable[GroupDraft]) -> None:
        """Forget the groups, whether they wait or run, and free what they hold."""
        gone = {id(group) for group in groups}
        self._waiting = deque(waiting for waiting in self._waiting if id(waiting.group) not in gone)
        leaving = [share for share in self._shares if id(share.group) in gone]
        self._shares = [share for share in self._shares if id(share.group) not in gone]
        if self._processor is None:
            return
        scheduler = self._processor.scheduler
        for request_id in (id for share in leaving for id in share.request_ids):
            if request_id in scheduler.active_requests or request_id in scheduler.waiting_requests:
                scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()

    def weights_changed(self) -> None:
        """Nothing to do: no prompt's keys are shared beyond the responses that were admitted with it."""

    def forget_cache(self) -> None:
        """Free the cache; the next group builds a new one."""
        assert not self._shares, f"{len(self._shares)} shares still hold blocks of the cache"
        self._processor = None
        self._num_blocks = 0

    def _forward(self) -> None:
        processor = self._processor
        assert processor is not None, "responses were admitted without a cache"
        device = self._model.device
        # The current CUDA device is each thread's own.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if not processor.prepare_next_batch():
                raise RolloutError(f"continuous batching scheduled none of {self.num_running} open responses")
            processor._generation_step(self._model)
            processor.update_batch()

    def _fail(self, error: Exception) -> StepReport:
        failed = {id(share.group): share.group for share in self._shares}
        # What could not be admitted is at fault when nothing ran.
        if not failed and self._waiting:
            failed = {id(self._waiting[0].group): self._waiting[0].group}
        self.withdraw(failed.values())
        self._processor = None
        self._num_blocks = 0
        ended = tuple(failed.values())
        return StepReport(failed=ended, error=failure(ended, error))

    def _admit(self) -> None:
        if self._waiting and not self._make_room():
            return
        while self._waiting:
            waiting = self._waiting[0]
            num_responses = self._admissible(waiting)
            if num_responses == 0:
                return
            self._start(waiting, num_responses)
            if waiting.num_left == 0:
                self._waiting.popleft()

    def _make_room(self) -> bool:
        """Build or grow the cache; false while running responses must leave first."""
        wanted = self._wanted_blocks()
        groups = [waiting.group for waiting in self._waiting]
        longest = max(group.prompt.num_tokens + group.max_response_tokens for group in groups)
        if self._processor is not None and wanted <= self._num_blocks and longest <= self._longest_request:
            return True
        if self._shares:
            return False
        if wanted > self._num_blocks:
            wanted = max(wanted, ceil(self._num_blocks * _GROWTH))
        self._num_blocks = max(self._num_blocks, wanted)
        self._longest_request = max(longest, self._longest_request)
        self._processor = None  # frees the old cache before the new one is made
        self._processor = build_processor(
            self._model, self._num_blocks, self._max_concurrent_responses, self._longest_request
        )
        return True

    def _wanted_blocks(self) -> int:
        if self._cache_tokens is not None:
            return self.layout.tokens_to_blocks(self._cache_tokens)
        num_open = self.num_running + sum(waiting.num_left for waiting in self._waiting)
        widest = 0.0
        for waiting in self._waiting:
            num_responses = min(waiting.num_left, self._max_concurrent_responses)
            widest = max(widest, self._needed(waiting.group, num_responses) / num_responses)
        return ceil(widest * min(num_open, self._max_concurrent_responses))

    def _needed(self, group: GroupDraft, num_responses: int) -> int:
        return self.layout.blocks(group.prompt.num_tokens, group.max_response_tokens, num_responses)

    def _admissible(self, waiting: _Waiting) -> int:
        """Responses of the group to start now, as many as can ever run together; 0 to wait."""
        free_blocks = self._num_blocks - sum(share.reserved_blocks for share in self._shares)
        num_responses = min(waiting.num_left, self._max_concurrent_responses)
        while num_responses > 1 and self._needed(waiting.group, num_responses) > self._num_blocks:
            num_responses -= 1
        has_slots = self.num_running + num_responses <= self._max_concurrent_responses
        return num_responses if has_slots and self._needed(waiting.group, num_responses) <= free_blocks else 0

    def _start(self, waiting: _Waiting, num_responses: int) -> None:
        group = waiting.group
        first = waiting.num_admitted
        drafts = waiting.drafts[first : first + num_responses]
        tokens = [*group.prompt.token_ids.tolist(), *drafts[0].token_ids]
        # A prompt of one token leaves nothing to compute before the fork. A response that goes on is alone.
        forks = num_responses > 1 and len(tokens) > 1
        request_ids: list[str] = []
        assert self._processor is not None, "a group was admitted without a cache"
        for rows in [drafts] if forks else [(draft,) for draft in drafts]:
            request = SampledRequest.of(f"response{self._num_requests}", tokens, rows)
            self._num_requests += 1
            self._processor.scheduler.add_waiting_request(request)
            request_ids += [request.request_id, *request.child_ids()]
        num_prompt_tokens = group.prompt.num_tokens
        self._shares.append(
            _Share(
                group=group,
                drafts=drafts,
                request_ids=tuple(request_ids),
                shared_blocks=self.layout.shared_blocks(num_prompt_tokens, num_responses),
                blocks_per_response=self.layout.blocks_per_response(
                    num_prompt_tokens, group.max_response_tokens, num_responses
                ),
            )
        )
        waiting.num_admitted += num_responses


def cache_layout(model: PreTrainedModel) -> CacheLayout:
    """How continuous batching groups the model's layers. Raises UserError for layers it cannot cache."""
    check_layers(model)
    config = model.config.get_text_config()
    _, kinds = cb_cache.group_layers_by_attn_type(config)
    num_sliding = kinds.count("sliding_attention")
    return CacheLayout(
        block_tokens=BLOCK_TOKENS,
        num_full=len(kinds) - num_sliding,
        num_sliding=num_sliding,
        window=config.sliding_window if num_sliding else None,
    )
