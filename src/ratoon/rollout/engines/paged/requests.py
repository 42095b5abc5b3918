"""A response on its way through the batch, the group it belongs to, and the prompt it reads."""

# Shape letters: P prompt tokens, V vocabulary.

from dataclasses import dataclass, field

from torch import Tensor

from ratoon.rollout.drafts import GroupDraft, ResponseDraft

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """The keys of one prompt in the cache, under the weights of the time they were written."""

    num_tokens: int
    blocks: list[int]
    num_prefilled: int = 0
    logits_V: Tensor | None = None
    """Of its last token, while a response of the group has not begun: the first tokens of all are drawn from it."""

    @property
    def is_complete(self) -> bool:
        return self.num_prefilled == self.num_tokens


@dataclass(slots=True, eq=False)
class Family:
    """The responses of one group."""

    group: GroupDraft
    num_waiting: int
    num_unstarted: int
    """Responses without a token."""

    prompt: SharedPrompt | None = None
    """What its next response will read; those that began under other weights may read another."""


@dataclass(slots=True, eq=False)
class Request:
    """One response. It waits without holding anything, or has a slot, a prompt and blocks of its own."""

    order: int
    """Of arrival: the later are the younger."""

    family: Family
    draft: ResponseDraft
    slot: int = NO_SLOT
    prompt: SharedPrompt | None = None
    own_blocks: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    """Own tokens that were written again since it got its slot. Counted until it decodes."""

    @property
    def num_to_prefill(self) -> int:
        """Own tokens that must be in the cache before it decodes: all but the last, which the decode pass writes."""
        return max(len(self.draft.token_ids) - 1, 0)
