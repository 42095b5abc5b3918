"""The drafts of one `generate` call, once what it asks for has been looked at: the same for every engine."""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.rollout.begun import check_begun, check_new_tokens
from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.drafts import Ending, GroupDraft, PolicyStamp
from ratoon.rollout.stopping import StopStrings, eos_token_ids
from ratoon.types import Prompt, RolloutGroup, SamplingParams, UserError


@dataclass(frozen=True, slots=True)
class DraftMaker:
    """What the groups of one engine have in common."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    stamp: PolicyStamp
    max_support_ids: int
    returns_routes: bool

    @classmethod
    def of(
        cls, config: RolloutConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stamp: PolicyStamp
    ) -> "DraftMaker":
        settings = model.generation_config
        configured = None if settings is None else settings.eos_token_id
        return cls(
            tokenizer=tokenizer,
            eos_ids=eos_token_ids(configured, tokenizer),
            stamp=stamp,
            max_support_ids=config.max_support_ids,
            returns_routes=config.return_routed_experts,
        )

    def make(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        begun: RolloutGroup | None,
        max_new_tokens: int | None,
        vocab_size: int,
    ) -> GroupDraft:
        """Raises ValueError as `RolloutEngine.generate` does for `begun` and `max_new_tokens`."""
        check_new_tokens(max_new_tokens)
        if begun is not None:
            check_begun(
                begun,
                prompt,
                group_size=group_size,
                sampling=sampling,
                vocab_size=vocab_size,
                returns_routes=self.returns_routes,
            )
        stop = StopStrings(sampling.stop, self.tokenizer)
        return GroupDraft.start(
            prompt,
            group_size,
            sampling,
            step,
            ending=Ending(self.eos_ids, stop, sampling.max_response_tokens, max_new_tokens),
            stamp=self.stamp,
            max_support_ids=self.max_support_ids,
            begun=begun,
        )


def check_prompt(prompt: Prompt, group_size: int, vocab_size: int) -> None:
    """Raises ValueError for a group of no response, UserError for token ids that the model does not have."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    largest = int(prompt.token_ids.max())
    if largest >= vocab_size:
        raise UserError(
            f"prompt {prompt.id!r} holds token id {largest}, but the model has {vocab_size:,} embeddings; "
            "use the tokenizer of the model"
        )
