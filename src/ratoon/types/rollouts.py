"""Prompts, responses, and the group of responses that one prompt grew."""

# Shape letters: P prompt tokens, R response tokens, N responses of a group.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class FinishReason(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    """The model ended it with an end-of-sequence token, which is the response's last token."""

    STOP = "stop"
    """A stop string appeared in its text; the tokens that complete the string are kept."""

    LENGTH = "length"
    """It has as many tokens as a response may have (`max_response_tokens`)."""

    ABORT = "abort"
    """The engine was told to stop; the tokens so far are kept."""

    BUDGET = "budget"
    """It has all the tokens that its call allowed (`max_new_tokens`), and can go on in a later one."""


def token_array(token_ids: ArrayLike, what: str) -> NDArray[np.int64]:
    """A read-only 1-D int64 copy of `token_ids`; `what` names them in an error."""
    try:
        given = np.asarray(token_ids)
    except ValueError:
        raise ValueError(
            f"{what}: token ids must be one flat list of integers, got nested lists of uneven length"
        ) from None
    if given.size == 0 and given.ndim == 1:
        given = given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError(
            f"{what}: token ids must be a 1-D array or list of integers, got shape {given.shape} of {given.dtype}"
        )
    if given.size and (int(given.min()) < 0 or int(given.max()) > np.iinfo(np.int32).max):
        raise ValueError(
            f"{what}: token ids must lie in [0, 2**31), got {int(given.min())} to {int(given.max())}; "
            "padding or ignore indices (such as -100) do not belong in token ids"
        )
    tokens = given.astype(np.int64)  # always a copy: the caller's array may change later
    tokens.setflags(write=False)
    return tokens


def _check_one_per_token(array: NDArray[Any], num_tokens: int, what: str) -> None:
    if array.shape != (num_tokens,):
        raise ValueError(
            f"{what} must hold one entry for each of {num_tokens} response tokens, got shape {array.shape}"
        )
    array.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the policy is asked to continue."""

    id: str | int
    """Names the prompt in logs and seeds its sampling. Need not be unique in a step."""

    token_ids: NDArray[np.int64]
    """[P] int64, P >= 1. Any 1-D integer array or list is accepted."""

    text: str = ""
    """What `token_ids` encode, for rewards and for people."""

    answer: str | None = None
    """The reference answer, where the task has one."""

    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All that the data row held, by column; rewards may read it."""

    def __post_init__(self) -> None:
        tokens = token_array(self.token_ids, f"prompt {self.id!r}")
        if tokens.size == 0:
            raise ValueError(
                f"prompt {self.id!r} is empty, but the first response token needs a token to be predicted from; "
                "drop the row or begin the prompt with a BOS token"
            )
        object.__setattr__(self, "token_ids", tokens)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size


@dataclass(frozen=True, slots=True, eq=False)
class SampledSupport:
    """The tokens that each response token was drawn among, where top-p, top-k or min-p left the others out.

    Token i of R was drawn among `token_ids[offsets[i]:offsets[i + 1]]`, itself one of them. Its log-prob is the
    log-softmax over these alone, in rollout and in training alike.
    """

    offsets: NDArray[np.int64]
    """[R + 1] int64, not decreasing, from 0."""

    token_ids: NDArray[np.int32]
    """[offsets[-1]] int32, each token's in ascending order."""

    def __post_init__(self) -> None:
        offsets, token_ids = np.array(self.offsets, np.int64), np.array(self.token_ids, np.int32)
        if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or (np.diff(offsets) < 1).any():
            raise ValueError("support offsets must rise from 0, at least one kept token for each response token")
        if token_ids.shape != (int(offsets[-1]),):
            raise ValueError(f"support must hold {int(offsets[-1])} kept token ids, got shape {token_ids.shape}")
        is_rising = np.diff(token_ids) > 0
        is_rising[offsets[1:-1] - 1] = True  # from one token's ids to the next one's
        if (token_ids < 0).any() or not is_rising.all():
            raise ValueError("each token's kept ids must be distinct, in ascending order and not negative")
        for name, array in (("offsets", offsets), ("token_ids", token_ids)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def num_tokens(self) -> int:
        """R."""
        return self.offsets.size - 1

    def missing(self, token_ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Where `token_ids` [R] are not among the kept ones: indices in [0, R), ascending."""
        if self.num_tokens == 0:
            return np.empty(0, np.int64)
        is_drawn = np.repeat(token_ids, np.diff(self.offsets)) == self.token_ids
        return np.flatnonzero(~np.logical_or.reduceat(is_drawn, self.offsets[:-1]))

    def part(self, start: int, stop: int) -> "SampledSupport":
        """That of tokens `start` to `stop`, the latter left out."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return SampledSupport(self.offsets[start : stop + 1] - first, self.token_ids[first:last])

    @classmethod
    def of(cls, kept: Sequence[NDArray[np.int32]]) -> "SampledSupport":
        """From the kept token ids of each of R tokens."""
        counts = np.array([0, *(ids.size for ids in kept)], np.int64)
        return cls(np.cumsum(counts), np.concatenate([np.empty(0, np.int32), *kept]))

    @classmethod
    def concatenate(cls, supports: "Sequence[SampledSupport]") -> "SampledSupport":
        """One support for the tokens of all, in order."""
        counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(support.offsets) for support in supports)])
        token_ids = np.concatenate([np.empty(0, np.int32), *(support.token_ids for support in supports)])
        return cls(np.cumsum(counts), token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled continuation of a prompt."""

    token_ids: NDArray[np.int64]
    """[R] int64, R >= 0, the EOS token included where the model ended with one."""

    rollout_logprobs: NDArray[np.float32] | None = None
    """[R] float32. Log-probability of each token under the distribution it was drawn from."""

    text: str = ""
    """The decoded response without special tokens, for rewards and for people."""

    finish_reason: FinishReason = FinishReason.EOS

    policy_versions: NDArray[np.int64] | None = None
    """[R] int64. Version of the weights that drew each token."""

    support: SampledSupport | None = None
    """Of R tokens, where sampling left some out; None: each was drawn among the whole vocabulary."""

    routed_experts: NDArray[np.int16] | None = None
    """[P + R, L, K] int16, L all layers of the model: the experts that each token was routed to in the pass that drew
    what follows it. -1 where there are none: in layers without experts, and for the last token, behind which nothing
    was drawn. New weights that compute its keys again change nothing here."""

    def __post_init__(self) -> None:
        tokens = token_array(self.token_ids, "response")
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "finish_reason", FinishReason(self.finish_reason))
        if self.rollout_logprobs is not None:
            logprobs = np.array(self.rollout_logprobs, np.float32)
            _check_one_per_token(logprobs, tokens.size, "rollout_logprobs")
            if np.isnan(logprobs).any() or (logprobs > 1e-3).any():
                raise ValueError(
                    "rollout_logprobs must be log-probabilities (<= 0, not NaN); check what the engine returned"
                )
            object.__setattr__(self, "rollout_logprobs", logprobs)
        if self.policy_versions is not None:
            versions = np.array(self.policy_versions)
            if versions.size and versions.dtype.kind not in "iu":
                raise ValueError(f"policy_versions must be integers, got {versions.dtype}")
            versions = versions.astype(np.int64)
            _check_one_per_token(versions, tokens.size, "policy_versions")
            object.__setattr__(self, "policy_versions", versions)
        if self.support is not None:
            if self.support.num_tokens != tokens.size:
                raise ValueError(f"support is of {self.support.num_tokens} tokens, the response has {tokens.size}")
            missing = self.support.missing(tokens)
            if missing.size:
                raise ValueError(
                    f"response token {missing[0]}, {tokens[missing[0]]}, is not among the tokens that its support says "
                    "it was drawn among; check what the engine returned"
                )
        if self.routed_experts is not None:
            experts = np.array(self.routed_experts, np.int16)
            if experts.ndim != 3 or experts.shape[0] < tokens.size:
                raise ValueError(
                    "routed_experts must be [prompt and response tokens, layers, experts per token], "
                    f"got {experts.shape} for a response of {tokens.size} tokens"
                )
            experts.setflags(write=False)
            object.__setattr__(self, "routed_experts", experts)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size

    @property
    def is_truncated(self) -> bool:
        """Its greatest length ended it, not the model."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def can_go_on(self) -> bool:
        """It was stopped, by a token budget or an abort, and a later `generate` may take it further."""
        return self.finish_reason in (FinishReason.BUDGET, FinishReason.ABORT)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """One prompt and its N responses."""

    prompt: Prompt
    responses: tuple[Response, ...]
    """N >= 0 responses; any sequence is accepted."""

    rewards_N: NDArray[np.float64] | None = None
    """[N] float64, once scored."""

    advantages_N: NDArray[np.float64] | None = None
    """[N] float64, once compared."""

    reward_components: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    """By name, [N] float64 before weighting: what `rewards_N` was added up from."""

    score_failed_N: NDArray[np.bool_] | None = None
    """[N] bool, once scored: a reward function gave no score, which counts as 0 among `reward_components`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "responses", tuple(self.responses))
        for index, response in enumerate(self.responses):
            if not isinstance(response, Response):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(
                    f"prompt {self.prompt.id!r}: responses must hold Response objects, "
                    f"got {type(response).__name__} at {index}"
                )
            experts, num_tokens = response.routed_experts, self.prompt.num_tokens + response.num_tokens
            if experts is not None and experts.shape[0] != num_tokens:
                raise ValueError(
                    f"prompt {self.prompt.id!r}: response {index} has routed_experts of {experts.shape[0]} tokens, and "
                    f"there are {num_tokens} with the prompt's; -1 stands for the last token's"
                )
        for name in ("rewards_N", "advantages_N"):
            values = getattr(self, name)
            if values is None:
                continue
            array = np.array(values, dtype=np.float64)
            if array.shape != (self.group_size,):
                raise ValueError(
                    f"prompt {self.prompt.id!r}: {name} must be [{self.group_size}], one for each response, "
                    f"got shape {array.shape}"
                )
            if not np.isfinite(array).all():
                raise ValueError(f"prompt {self.prompt.id!r}: {name} must be finite, got {array.tolist()}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.score_failed_N is not None and self.score_failed_N.shape != (self.group_size,):
            raise ValueError(
                f"prompt {self.prompt.id!r}: score_failed_N must be [{self.group_size}], one for each response, "
                f"got shape {self.score_failed_N.shape}"
            )

    @property
    def group_size(self) -> int:
        return len(self.responses)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        return tuple(response.num_tokens for response in self.responses)

    @property
    def num_logical_tokens(self) -> int:
        """Tokens that N separate sequences would hold."""
        return self.group_size * self.prompt.num_tokens + sum(self.response_lengths)

    @property
    def num_rows(self) -> int:
        """Tokens stored when the prompt is shared."""
        return self.prompt.num_tokens + sum(self.response_lengths)

    def select(self, response_indices: Sequence[int]) -> "RolloutGroup":
        """The same prompt with some of its responses, rewards and advantages."""
        chosen = list(response_indices)
        return replace(
            self,
            responses=tuple(self.responses[index] for index in chosen),
            rewards_N=None if self.rewards_N is None else self.rewards_N[chosen],
            advantages_N=None if self.advantages_N is None else self.advantages_N[chosen],
            reward_components={name: values_N[chosen] for name, values_N in self.reward_components.items()},
            score_failed_N=None if self.score_failed_N is None else self.score_failed_N[chosen],
        )
