"""Responses and groups while they are being generated."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from ratoon.rollout.draws import response_key
from ratoon.rollout.stopping import StopStrings, decode
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SamplingParams


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

    def reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Why the response ends with its last token; None while it goes on."""
        if token_ids[-1] in self.eos_ids:
            return FinishReason.EOS
        if self.stop.ends(token_ids):
            return FinishReason.STOP
        if len(token_ids) >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class ResponseDraft:
    """What one response has so far."""

    key: int
    """Of its draws (`response_key`)."""

    temperature: float
    ending: Ending
    stamp: PolicyStamp
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token_id: int, logprob: float) -> bool:
        """Append a token; true when it ends the response."""
        assert self.finish_reason is None, f"a response that ended by {self.finish_reason} was given another token"
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(self.stamp.version)
        self.finish_reason = self.ending.reason(self.token_ids)
        return self.finish_reason is not None

    def response(self, tokenizer: PreTrainedTokenizerBase) -> Response:
        """The response as it stands; one that has not ended was aborted."""
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
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupDraft:
    """One `generate` call: a prompt and the drafts of its responses."""

    prompt: Prompt
    drafts: tuple[ResponseDraft, ...]
    max_response_tokens: int

    @classmethod
    def start(
        cls, prompt: Prompt, group_size: int, sampling: SamplingParams, step: int, ending: Ending, stamp: PolicyStamp
    ) -> "GroupDraft":
        return cls(
            prompt=prompt,
            drafts=tuple(
                ResponseDraft(
                    key=response_key(sampling.seed, step, prompt.id, index),
                    temperature=sampling.temperature,
                    ending=ending,
                    stamp=stamp,
                )
                for index in range(group_size)
            ),
            max_response_tokens=sampling.max_response_tokens,
        )

    @property
    def is_complete(self) -> bool:
        return all(draft.finish_reason is not None for draft in self.drafts)

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return sum(len(draft.token_ids) for draft in self.drafts)

    def group(self, tokenizer: PreTrainedTokenizerBase) -> RolloutGroup:
        return RolloutGroup(self.prompt, tuple(draft.response(tokenizer) for draft in self.drafts))
