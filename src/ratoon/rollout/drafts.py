"""Responses and groups while they are being generated."""

# Shape letters: P prompt tokens, R response tokens, N responses, L layers of the model, K experts per token.

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ratoon.rollout.draws import response_key
from ratoon.rollout.stopping import StopStrings, decode
from ratoon.rollout.truncation import Truncation
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SampledSupport, SamplingParams, UserError


@dataclass(slots=True)
class PolicyStamp:
    """The version of the weights in use; one object for an engine and all its drafts."""

    version: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends the responses of one group."""

    eos_ids: frozenset[int]
    stop: StopStrings
    max_tokens: int
    max_new_tokens: int | None = None
    """Of one call; None: a response runs to its end."""

    def reason(self, token_ids: Sequence[int], num_begun: int = 0) -> FinishReason | None:
        """Why the response ends, or stops, with its last token; None while it goes on.

        num_begun: tokens of earlier calls.
        """
        if token_ids[-1] in self.eos_ids:
            return FinishReason.EOS
        if self.stop.ends(token_ids):
            return FinishReason.STOP
        if len(token_ids) >= self.max_tokens:
            return FinishReason.LENGTH
        if self.max_new_tokens is not None and len(token_ids) - num_begun >= self.max_new_tokens:
            return FinishReason.BUDGET
        return None

    def is_far(self, token_ids: Sequence[int], num_new: int, num_begun: int) -> bool:
        """Whether none of the last `num_new` tokens ends the response or stops it, as one look can tell."""
        return (
            len(token_ids) < self.max_tokens
            and (self.max_new_tokens is None or len(token_ids) - num_begun < self.max_new_tokens)
            and self.eos_ids.isdisjoint(token_ids[-num_new:])
            and self.stop.are_missing(token_ids, num_new)
        )


@dataclass(slots=True, eq=False)
class SupportBudget:
    """How many kept token ids the responses of one group may record."""

    prompt_id: str | int
    max_ids: int
    num_ids: int = 0
    num_tokens: int = 0

    def spend(self, num_ids: int) -> None:
        """Of one token. Raises UserError where the group's ids no longer fit."""
        self.num_ids += num_ids
        self.num_tokens += 1
        if self.num_ids > self.max_ids:
            raise UserError(
                f"prompt {self.prompt_id!r}: its responses' {self.num_tokens:,} tokens so far were drawn among "
                f"{self.num_ids / self.num_tokens:,.0f} kept tokens each, {self.num_ids:,} ids in all, over the "
                f"{self.max_ids:,} that are the group's share of rollout.max_support_mib; training needs them all: set "
                "top_k (1000 changes little), lower top_p or raise min_p, or raise rollout.max_support_mib if the "
                "machine has the memory"
            )


@dataclass(slots=True, eq=False)
class ResponseDraft:
    """What one response has so far."""

    key: int
    """Of its draws (`response_key`)."""

    temperature: float
    truncation: Truncation | None
    ending: Ending
    stamp: PolicyStamp
    budget: SupportBudget
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[NDArray[np.int32]] = field(default_factory=list)
    """The ids that each token was drawn among; stays empty without truncation."""

    routes: list[NDArray[np.int16]] = field(default_factory=list[NDArray[np.int16]])
    """[n, L, K] each, behind one another from the prompt's first token on: the experts of every token that the model
    has read, which is all but the last. Empty before the first token, and from engines that return none."""

    num_begun: int = 0
    """Tokens of earlier calls."""

    ended: Response | None = None
    """What an earlier call brought to its end, handed out again as it is."""

    finish_reason: FinishReason | None = None
    """None while it is to have more tokens."""

    def go_on_from(self, begun: Response) -> None:
        """Take over what an earlier call drew (`check_begun`). A response without a token has not begun."""
        assert not self.token_ids, "a response goes on from an earlier one after it has tokens"
        if not begun.can_go_on:
            self.ended, self.finish_reason = begun, begun.finish_reason
            return
        R = begun.num_tokens
        self.num_begun = R
        self.token_ids = begun.token_ids.tolist()
        self.logprobs = [0.0] * R if begun.rollout_logprobs is None else begun.rollout_logprobs.tolist()
        assert R == 0 or begun.policy_versions is not None, "a response without versions is gone on from"
        self.versions = [] if begun.policy_versions is None else begun.policy_versions.tolist()
        if begun.support is not None:
            for kept in np.split(begun.support.token_ids, begun.support.offsets[1:-1])[:R]:
                self.draw_among(kept)
        if begun.routed_experts is not None and R:
            # The last token's are known once this call's first pass has read it.
            self.routes.append(begun.routed_experts[:-1])
        # An engine that was aborted may have drawn the last token that there can be.
        if R:
            self.finish_reason = self.ending.reason(self.token_ids, num_begun=R)

    @property
    def num_left(self) -> int:
        """Tokens that it may still get in this call."""
        left = self.ending.max_tokens - len(self.token_ids)
        most = self.ending.max_new_tokens
        return left if most is None else min(left, most - (len(self.token_ids) - self.num_begun))

    def draw_among(self, kept: NDArray[np.int32]) -> None:
        """What the next token to be taken was drawn among. Raises UserError where it does not fit the budget."""
        self.kept.append(kept)
        self.budget.spend(kept.size)

    def take(self, token_id: int, logprob: float) -> bool:
        """Append a token; true when it ends the response."""
        assert self.finish_reason is None, f"a response that ended by {self.finish_reason} was given another token"
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(self.stamp.version)
        num_kept_sets = 0 if self.truncation is None else len(self.token_ids)
        assert len(self.kept) == num_kept_sets, f"{len(self.token_ids)} tokens were drawn among {len(self.kept)} sets"
        self.finish_reason = self.ending.reason(self.token_ids, self.num_begun)
        return self.finish_reason is not None

    def take_until_end(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Append tokens up to the one that ends the response, and forget those behind it; true where it ended."""
        assert self.finish_reason is None, f"a response that ended by {self.finish_reason} was given more tokens"
        if self.truncation is None:
            num_before = len(self.token_ids)
            self.token_ids += token_ids
            if self.ending.is_far(self.token_ids, len(token_ids), self.num_begun):
                self.logprobs += logprobs
                self.versions += [self.stamp.version] * len(token_ids)
                return False
            del self.token_ids[num_before:]
        return any(self.take(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True))

    def response(self, tokenizer: PreTrainedTokenizerBase) -> Response:
        """The response as it stands; one that has not ended was aborted."""
        if self.ended is not None:
            return self.ended
        text = decode(tokenizer, self.token_ids)
        if self.finish_reason is FinishReason.STOP:
            text = self.ending.stop.cut(text) or text
        is_greedy = self.temperature == 0
        return Response(
            token_ids=np.array(self.token_ids, np.int64),
            rollout_logprobs=None if is_greedy else np.array(self.logprobs, np.float32),
            text=text,
            finish_reason=self.finish_reason or FinishReason.ABORT,
            policy_versions=np.array(self.versions, np.int64),
            support=None if self.truncation is None else SampledSupport.of(self.kept),
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> NDArray[np.int16] | None:
        """[P + R, L, K], -1 for the last token; None before the first token, and without routes."""
        if not self.routes:
            return None
        return np.concatenate([*self.routes, np.full_like(self.routes[0][:1], -1)])


@dataclass(frozen=True, slots=True, eq=False)
class GroupDraft:
    """One `generate` call: a prompt and the drafts of its responses."""

    prompt: Prompt
    drafts: tuple[ResponseDraft, ...]
    max_response_tokens: int

    @classmethod
    def start(
        cls,
        prompt: Prompt,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        *,
        ending: Ending,
        stamp: PolicyStamp,
        max_support_ids: int,
        begun: RolloutGroup | None = None,
    ) -> "GroupDraft":
        """max_support_ids: kept token ids that one response may record, on average over the group.

        begun: what an earlier call drew of the same group (`check_begun`).
        """
        budget = SupportBudget(prompt.id, group_size * max_support_ids)
        group = cls(
            prompt=prompt,
            drafts=tuple(
                ResponseDraft(
                    key=response_key(sampling.seed, step, prompt.id, index),
                    temperature=sampling.temperature,
                    truncation=Truncation.of(sampling),
                    ending=ending,
                    stamp=stamp,
                    budget=budget,
                )
                for index in range(group_size)
            ),
            max_response_tokens=sampling.max_response_tokens,
        )
        if begun is not None:
            for draft, response in zip(group.drafts, begun.responses, strict=True):
                draft.go_on_from(response)
        return group

    @property
    def open_drafts(self) -> tuple[ResponseDraft, ...]:
        """Those that are to have more tokens."""
        return tuple(draft for draft in self.drafts if draft.finish_reason is None)

    @property
    def is_complete(self) -> bool:
        return all(draft.finish_reason is not None for draft in self.drafts)

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(draft.token_ids) for draft in self.drafts)

    def group(self, tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
        return RolloutGroup(self.prompt, tuple(draft.response(tokenizer) for draft in self.drafts))
