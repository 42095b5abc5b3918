"""A response on its way through the batch, the group it belongs to, and the prompt it reads."""

# Shape letters: P prompt tokens, V vocabulary, L layers of the model, K experts per token.

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
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

    routes: list[Tensor] = field(default_factory=list[Tensor])
    """[n, L, K] int16 of each of its pieces on the model's device, until it is complete and the first response begins.
    Empty where the runner returns none."""

    routes_PLK: NDArray[np.int16] | None = None
    """The same of all its tokens in main memory: one array for all responses that begin on it."""

    @property
    def is_complete(self) -> bool:
        return self.num_prefilled == self.num_tokens

    def taken_routes(self) -> NDArray[np.int16] | None:
        """[P, L, K] of the complete prompt. The first call waits for the device, and frees what was held there."""
        if self.routes:
            self.routes_PLK = torch.cat(self.routes).cpu().numpy()
            self.routes.clear()
        return self.routes_PLK


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
