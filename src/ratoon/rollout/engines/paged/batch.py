"""Continuous batching of single responses: who has a slot, what each pass computes, and who is done.

A step is at most one prefill pass and the decode passes of one call, so newcomers never keep running responses waiting
for longer than one pass of `prefill_tokens`. Everything here runs on the engine's one thread.
"""

# Shape letters: P prompt tokens, B responses of one pass, U prompts, V vocabulary, T tokens of one piece, S steps, L
# layers of the model, K experts per token.

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.drafts import GroupDraft
from ratoon.rollout.engines.drawing import TokenScore, check_finite, draw_tokens
from ratoon.rollout.engines.paged.holdings import Holdings
from ratoon.rollout.engines.paged.requests import Family, Request
from ratoon.rollout.engines.paged.runner import DrawnTokens, Draws, PrefillPiece, Runner
from ratoon.rollout.engines.paged.tables import SlotTables
from ratoon.rollout.engines.stepping import StepReport, failure

PREFILL_TOKENS = 16_384
"""Most rows of one prefill pass; a longer prompt is read in pieces. A pass costs the host about a millisecond a layer,
whatever its size: few passes, then, though running responses wait for each."""


class PagedBatch:
    """Responses take slots first come, first served, and blocks as they grow.

    Where no block is free the youngest gives up its slot and blocks. It keeps its tokens, and computes their keys
    again, under the weights of that time, when it has a slot again: its draws are those of its positions, so it goes on
    as if nothing had been.
    """

    def __init__(
        self,
        runner: Runner,
        max_concurrent_responses: int,
        cache_tokens: int | None,
        *,
        restarts: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
        score: TokenScore | None = None,
    ) -> None:
        """cache_tokens: capacity of the cache; None: as much as `max_concurrent_responses` of what came can fill.

        restarts: new weights compute the keys of responses in flight again, rather than go on from old ones.
        score: of tokens that the host draws, where the runner scores its own by it.
        """
        self._score = score
        self._runner = runner
        self._max_concurrent_responses = max_concurrent_responses
        self._cache_tokens = cache_tokens
        self._restarts = restarts
        self._block_tokens = runner.block_tokens
        self._prefill_tokens = prefill_tokens
        self._holdings = Holdings(runner.block_tokens, spare_tokens=runner.steps_together - 1)
        self._tables = SlotTables(max_concurrent_responses, runner.block_tokens)
        self._families: dict[int, Family] = {}
        self._waiting: deque[Request] = deque()
        # Those with a slot, and of them those that do not decode yet.
        self._seated: list[Request] = []
        self._entering: list[Request] = []
        self._finished: list[GroupDraft] = []
        self._num_requests = 0
        # Of the groups that came: a response's blocks with its part of the prompt's, and a prompt's.
        self._most_blocks_per_response = 0.0
        self._most_prompt_blocks = 0

    @property
    def num_running(self) -> int:
        return len(self._seated)

    @property
    def num_blocks(self) -> int:
        """Of the cache as it is now; it grows."""
        return self._holdings.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._holdings.num_free

    def check_fits(self, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise UserError where `cache_tokens` cannot hold even one response."""
        if self._cache_tokens is not None:
            self._holdings.check_fits(self._cache_tokens, prompt_id, num_prompt_tokens, max_response_tokens)

    def add(self, group: GroupDraft) -> None:
        """See `Batch.add`. What an earlier call began enters as after a pre-emption: its tokens' keys are computed."""
        drafts = group.open_drafts
        num_unstarted = sum(not draft.token_ids for draft in drafts)
        family = self._families[id(group)] = Family(group, num_waiting=len(drafts), num_unstarted=num_unstarted)
        for draft in drafts:
            self._waiting.append(Request(self._num_requests, family, draft))
            self._num_requests += 1
        num_prompt_blocks = self._holdings.blocks_for(group.prompt.num_tokens)
        num_together = min(len(drafts), self._max_concurrent_responses)
        per_response = self._holdings.most_own_blocks(group.max_response_tokens) + num_prompt_blocks / num_together
        self._most_blocks_per_response = max(self._most_blocks_per_response, per_response)
        self._most_prompt_blocks = max(self._most_prompt_blocks, num_prompt_blocks)

    def step(self) -> StepReport:
        """A prefill pass where responses enter, and decode passes; see `Batch.step`."""
        try:
            self._admit()
            if not self._seated:
                return StepReport()
            self._prefill()
            self._start()
            self._decode()
        except Exception as error:  # reported with the groups it ends; the next group meets a fresh cache
            return self._fail(error)
        return StepReport(finished=self._take_finished(), made_progress=True)

    def withdraw(self, groups: Iterable[GroupDraft]) -> None:
        """Forget the groups, whether they wait or run, and free what they hold."""
        gone = {family for group in groups if (family := self._families.pop(id(group), None)) is not None}
        if not gone:
            return
        for family in gone:
            family.num_waiting = 0
        self._waiting = deque(request for request in self._waiting if request.family not in gone)
        for request in [request for request in self._seated if request.family in gone]:
            self._unseat(request)
        for family in gone:
            self._holdings.forget_prompt(family)

    def weights_changed(self) -> None:
        """What has begun goes on from the keys it has, unless the batch restarts; whatever has not, begins anew."""
        self._runner.weights_changed()
        leaving = list(self._seated if self._restarts else self._entering)
        self._holdings.forget_prompts()
        self._preempt(leaving)

    def forget_cache(self) -> None:
        """Free the cache; the next group builds a new one."""
        assert not self._seated, f"{len(self._seated)} responses still hold blocks of the cache"
        self._holdings.forget_prompts()
        self._resize(0)
        self._most_blocks_per_response = 0.0
        self._most_prompt_blocks = 0

    def _fail(self, error: Exception) -> StepReport:
        failed = {id(request.family): request.family.group for request in self._seated}
        # What could not be admitted is at fault when nothing ran.
        if not failed and self._waiting:
            failed = {id(self._waiting[0].family): self._waiting[0].family.group}
        ended = tuple(failed.values())
        self.withdraw(ended)
        self._holdings.forget_prompts()
        self._resize(0)
        return StepReport(finished=self._take_finished(), failed=ended, error=failure(ended, error))

    def _take_finished(self) -> tuple[GroupDraft, ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def _resize(self, num_blocks: int) -> None:
        self._holdings.replace_pool(num_blocks)
        self._runner.resize(num_blocks)

    def _admit(self) -> None:
        if self._waiting:
            self._make_room()
        while self._waiting and self._tables.num_free_slots:
            request = self._waiting[0]
            # Before it is seated: a prompt without a reader stays for those that wait.
            if not self._holdings.seat(request):
                assert self._seated, f"prompt {request.family.group.prompt.id!r} does not fit an empty cache"
                return
            self._waiting.popleft()
            request.family.num_waiting -= 1
            self._tables.enter(request)
            self._seated.append(request)
            self._entering.append(request)

    def _make_room(self) -> None:
        """Build the cache, or a larger one where more responses or longer ones came than it was built for."""
        current = self._holdings.num_blocks
        if self._cache_tokens is not None:
            wanted = self._cache_tokens // self._block_tokens
            if current == 0:
                self._resize(wanted)
            return
        num_open = len(self._seated) + len(self._waiting)
        wanted = self._blocks_of(num_open)
        if wanted <= current:
            return
        # Keys are not copied: responses compute theirs again. Doubling bounds how often.
        self._preempt(list(self._seated))
        self._holdings.forget_prompts()
        self._resize(max(wanted, min(2 * current, self._blocks_of(self._max_concurrent_responses))))

    def _blocks_of(self, num_responses: int) -> int:
        num_together = min(num_responses, self._max_concurrent_responses)
        # One more prompt: those in the slots may be of one group more than would fill them.
        return ceil(self._most_blocks_per_response * num_together) + self._most_prompt_blocks

    def _preempt(self, requests: Sequence[Request]) -> None:
        """Send the requests back to wait, each at its place in the order of arrival."""
        for request in requests:
            request.family.num_waiting += 1
            self._unseat(request)
        if requests:
            self._waiting = deque(sorted([*requests, *self._waiting], key=lambda request: request.order))

    def _unseat(self, request: Request) -> None:
        self._tables.leave(request)
        self._seated.remove(request)
        if request in self._entering:
            self._entering.remove(request)
        request.num_prefilled = 0
        self._holdings.leave(request)

    def _prefill(self) -> None:
        """Write keys of prompts, and of pre-empted responses, that decoding ones will read."""
        pieces: list[PrefillPiece] = []
        of_pieces: list[Request] = []
        begun: set[int] = set()
        num_left = self._prefill_tokens
        for request in self._entering:
            if num_left == 0:
                break
            if id(request.prompt) in begun:
                continue
            piece = _next_piece(request, num_left)
            if piece is None:
                continue
            if piece.num_own_keys == 0:
                begun.add(id(request.prompt))
            num_left -= piece.token_ids.size
            pieces.append(piece)
            of_pieces.append(request)
        if not pieces:
            return
        found = self._runner.prefill(pieces)
        num_wanted = sum(piece.wants_logits for piece in pieces)
        assert found.logits_UV.shape[0] == num_wanted, f"{num_wanted} logits were wanted, got {len(found.logits_UV)}"
        rows, routes = iter(found.logits_UV), found.routes or [None] * len(pieces)
        for piece, request, routes_TLK in zip(pieces, of_pieces, routes, strict=True):
            _record(request, piece, next(rows) if piece.wants_logits else None, routes_TLK)

    def _start(self) -> None:
        """Draw the first token of each response whose prompt is complete; whatever is in the cache whole decodes."""
        ready = [request for request in self._entering if _is_ready(request)]
        if not ready:
            return
        gone = {id(request) for request in ready}
        starting = [request for request in ready if not request.draft.token_ids]
        if starting:
            token_B, logprob_B = _draw(starting, torch.stack([_first_logits(x) for x in starting]), self._score)
            for request in starting:
                assert request.prompt is not None, "a request without a seat is started"
                routes_PLK = request.prompt.taken_routes()
                if routes_PLK is not None:
                    request.draft.routes.append(routes_PLK)
            self._take(starting, DrawnTokens(token_B[None], logprob_B[None], None))
        self._entering = [request for request in self._entering if id(request) not in gone]
        for request in ready:
            if request.draft.finish_reason is None:
                self._tables.begin_decoding(request)

    def _decode(self) -> None:
        num_steps = self._num_steps()
        for request in self._tables.short_of_blocks(num_steps):
            self._grow(request, num_steps)
        decoding = self._tables.decoding(num_steps)
        if decoding is None:
            return
        requests, rows = decoding
        if any(request.draft.truncation is not None for request in requests):
            decoded = self._runner.decode(rows)
            token_B, logprob_B = _draw(requests, decoded.logits_BV, self._score)
            routes_BLK = None if decoded.routes_BLK is None else decoded.routes_BLK.cpu().numpy()
            drawn = DrawnTokens(token_B[None], logprob_B[None], None if routes_BLK is None else routes_BLK[None])
        else:
            drawn = self._runner.draw(rows, _draws_of(requests), num_steps)
            check_finite(bool(np.isfinite(drawn.logprob_SB).all()))
        self._tables.advance(requests, drawn.token_SB[-1], num_steps)
        self._take(requests, drawn)

    def _num_steps(self) -> int:
        """How many tokens each response draws at once. What its last ones are when it has ended is lost."""
        if any(request.draft.truncation is not None for request in self._seated):
            return 1  # the host draws them
        most = max((request.draft.num_left for request in self._seated), default=1)
        return max(1, min(self._runner.steps_together, most))

    def _grow(self, request: Request, num_steps: int) -> None:
        """Give a request blocks for its next tokens, at the cost of the youngest, which may be itself."""
        wanted = self._holdings.blocks_for(len(request.draft.token_ids) + num_steps - 1)
        # An older one may have taken its slot meanwhile.
        while request.prompt is not None and len(request.own_blocks) < wanted:
            if not self._holdings.grow(request):
                assert len(self._seated) > 1, "the only response in the batch ran out of blocks"
                self._preempt([max(self._seated, key=lambda seated: seated.order)])
        if request.prompt is not None:
            self._tables.own_blocks_grew(request)

    def _take(self, requests: list[Request], drawn: DrawnTokens) -> None:
        ended: list[Request] = []
        tokens, logprobs = drawn.token_SB.T.tolist(), drawn.logprob_SB.T.tolist()
        for row, (request, token_S, logprob_S) in enumerate(zip(requests, tokens, logprobs, strict=True)):
            num_before = len(request.draft.token_ids)
            if num_before == 0:
                _note_start(request.family)
            if request.draft.take_until_end(token_S, logprob_S):
                ended.append(request)
            if drawn.routes_SBLK is not None:
                # A copy: a part of the whole would keep the others' for as long as this response lives.
                num_taken = len(request.draft.token_ids) - num_before
                request.draft.routes.append(drawn.routes_SBLK[:num_taken, row].copy())
        for request in ended:
            self._unseat(request)
        for family in dict.fromkeys(request.family for request in ended):
            if family.group.is_complete:
                del self._families[id(family.group)]
                self._finished.append(family.group)


def _draw(
    requests: Sequence[Request], logits_BV: Tensor, score: TokenScore | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    token_B, logprob_B = draw_tokens([request.draft for request in requests], logits_BV, score)
    return token_B.cpu().numpy(), logprob_B.cpu().numpy()


def _draws_of(requests: Sequence[Request]) -> Draws:
    drafts = [request.draft for request in requests]
    return Draws(
        key_B=np.array([draft.key for draft in drafts], np.uint64),
        num_drawn_B=np.array([len(draft.token_ids) for draft in drafts], np.int64),
        temperature_B=np.array([draft.temperature for draft in drafts], np.float64),
    )


def _next_piece(request: Request, max_tokens: int) -> PrefillPiece | None:
    """What the request needs written next, of its prompt or itself; None where nothing is missing."""
    prompt, family = request.prompt, request.family
    assert prompt is not None, "a request without a seat is prefilled"
    if not prompt.is_complete:
        start, end = prompt.num_prefilled, min(prompt.num_prefilled + max_tokens, prompt.num_tokens)
        return PrefillPiece(
            token_ids=family.group.prompt.token_ids[start:end],
            prompt_blocks=prompt.blocks,
            num_prompt_keys=end,
            wants_logits=end == prompt.num_tokens and family.num_unstarted > 0,
        )
    start = request.num_prefilled
    end = min(start + max_tokens, request.num_to_prefill)
    if start == end:
        return None
    return PrefillPiece(
        token_ids=np.array(request.draft.token_ids[start:end], np.int64),
        prompt_blocks=prompt.blocks,
        num_prompt_keys=prompt.num_tokens,
        own_blocks=request.own_blocks,
        num_own_keys=end,
    )


def _record(request: Request, piece: PrefillPiece, logits_V: Tensor | None, routes_TLK: Tensor | None) -> None:
    prompt = request.prompt
    assert prompt is not None, "a request lost its seat during a pass"
    if piece.num_own_keys:
        # Tokens whose keys are computed again keep the routes of when they were drawn.
        request.num_prefilled = piece.num_own_keys
        return
    if routes_TLK is not None and request.family.num_unstarted:
        prompt.routes.append(routes_TLK)
    prompt.num_prefilled = piece.num_prompt_keys
    prompt.logits_V = logits_V


def _is_ready(request: Request) -> bool:
    prompt = request.prompt
    assert prompt is not None, "a request without a seat is started"
    return prompt.is_complete and request.num_prefilled == request.num_to_prefill


def _first_logits(request: Request) -> Tensor:
    assert request.prompt is not None and request.prompt.logits_V is not None, "a prompt without logits is continued"
    return request.prompt.logits_V


def _note_start(family: Family) -> None:
    """A response of the family has its first token; after the last one the logits are of no more use."""
    family.num_unstarted -= 1
    if family.num_unstarted == 0 and family.prompt is not None:
        family.prompt.logits_V = None
