"""Groups that were begun and that no step has trained on yet, and how a checkpoint holds them."""

# Shape letters: P prompt tokens, R response tokens.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.data import PromptStream, StreamState
from ratoon.loop.repeats import tell_apart
from ratoon.types.rollouts import FinishReason, Prompt, Response, RolloutGroup, SampledSupport


@dataclass(frozen=True, slots=True, eq=False)
class WaitingGroup:
    """One group that goes on, or is trained on, in a later step."""

    step: int
    """In which it was begun: all its draws go by it."""

    place: int
    """Of its prompt among those that the step took."""

    group: RolloutGroup

    @property
    def is_complete(self) -> bool:
        return not any(response.can_go_on for response in self.group.responses)


@dataclass(frozen=True, slots=True, eq=False)
class WaitingGroups:
    """What one step hands to the next."""

    groups: tuple[WaitingGroup, ...] = ()
    """In the order in which they were begun."""

    taken_at: Mapping[int, StreamState] = field(default_factory=dict[int, StreamState])
    """By the step that began groups of these: where the prompts stood before it took any."""

    @property
    def num_complete(self) -> int:
        return sum(waiting.is_complete for waiting in self.groups)

    def state(self) -> dict[str, Any]:
        """For `save_checkpoint`. Prompts are not in it: they are taken again from the same data."""
        return {
            "groups": [(waiting.step, waiting.place, waiting.group.group_size) for waiting in self.groups],
            "taken_at": {step: asdict(at) for step, at in self.taken_at.items()},
            "responses": _response_state([response for waiting in self.groups for response in waiting.group.responses]),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], prompts: PromptStream) -> "WaitingGroups":
        """What `state` was made of. prompts: the stream that its prompts came from; it stays where it stands."""
        taken_at = {step: StreamState(**at) for step, at in state["taken_at"].items()}
        most = {step: max(place for begun, place, _ in state["groups"] if begun == step) for step in taken_at}
        now = prompts.state()
        taken: dict[int, tuple[Prompt, ...]] = {}
        for step, at in taken_at.items():
            prompts.restore(at)
            taken[step] = tell_apart(prompts.take(most[step] + 1))
        prompts.restore(now)
        responses = _responses(state["responses"])
        groups = [
            WaitingGroup(step, place, RolloutGroup(taken[step][place], tuple(next(responses) for _ in range(size))))
            for step, place, size in state["groups"]
        ]
        return cls(tuple(groups), taken_at)


NONE_WAITING = WaitingGroups()


def _response_state(responses: Sequence[Response]) -> dict[str, Any]:
    """Each field of all responses behind one another: thousands of small tensors would be slow to write."""
    supports = [response.support for response in responses if response.support is not None]
    return {
        "finish_reasons": [response.finish_reason.value for response in responses],
        "texts": [response.text for response in responses],
        "lengths": torch.tensor([response.num_tokens for response in responses], dtype=torch.int64),
        "token_ids": _joined([response.token_ids for response in responses], np.int64),
        **_optional_state("logprobs", [response.rollout_logprobs for response in responses], np.float32),
        **_optional_state("versions", [response.policy_versions for response in responses], np.int64),
        "has_support": torch.tensor([response.support is not None for response in responses], dtype=torch.bool),
        "kept_counts": _joined([np.diff(support.offsets) for support in supports], np.int64),
        "kept_ids": _joined([support.token_ids for support in supports], np.int32),
        "routed_experts": [
            None if response.routed_experts is None else torch.from_numpy(response.routed_experts.copy())
            for response in responses
        ],
    }


def _optional_state(name: str, arrays: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> dict[str, Tensor]:
    return {
        f"has_{name}": torch.tensor([array is not None for array in arrays], dtype=torch.bool),
        name: _joined([array for array in arrays if array is not None], dtype),
    }


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype))


def _responses(state: Mapping[str, Any]) -> Iterator[Response]:
    lengths = state["lengths"].tolist()
    tokens, logprobs = _Column(state["token_ids"]), _Column(state["logprobs"])
    versions, counts, kept = _Column(state["versions"]), _Column(state["kept_counts"]), _Column(state["kept_ids"])
    has_logprobs, has_versions = state["has_logprobs"].tolist(), state["has_versions"].tolist()
    has_support = state["has_support"].tolist()
    for index, R in enumerate(lengths):
        experts = state["routed_experts"][index]
        support = None
        if has_support[index]:
            ends = np.cumsum(counts.take(R))
            support = SampledSupport(np.array([0, *ends], np.int64), kept.take(int(ends[-1]) if R else 0))
        yield Response(
            token_ids=tokens.take(R),
            rollout_logprobs=logprobs.take(R) if has_logprobs[index] else None,
            text=state["texts"][index],
            finish_reason=FinishReason(state["finish_reasons"][index]),
            policy_versions=versions.take(R) if has_versions[index] else None,
            support=support,
            routed_experts=None if experts is None else experts.numpy(),
        )


class _Column:
    """Handed out from the front."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.numpy()
        self._num_taken = 0

    def take(self, count: int) -> NDArray[Any]:
        first, self._num_taken = self._num_taken, self._num_taken + count
        return self._values[first : self._num_taken]
