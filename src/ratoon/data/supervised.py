"""Reference answers as responses, for the supervised warm start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ratoon.data.encoding import encode_answers, has_unknown
from ratoon.data.rows import name_some
from ratoon.types.errors import UserError
from ratoon.types.rollouts import FinishReason, Prompt, Response, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def supervised_examples(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_id: int,
    demonstrations: Sequence[str] | None = None,
) -> tuple[RolloutGroup, ...]:
    """For each prompt a group of one response: the tokens of its demonstration, then EOS.

    demonstrations: the texts to imitate, one for each prompt; the prompts' own answers when None.

    Packed like any group, exactly these tokens are scored. Raises UserError for prompts without an answer, and for
    answers that the tokenizer cannot write.
    """
    texts = [prompt.answer for prompt in prompts] if demonstrations is None else list(demonstrations)
    missing = [prompt.id for prompt, text in zip(prompts, texts, strict=True) if not text]
    if missing:
        raise UserError(
            f"{len(missing):,} of {len(prompts):,} prompts have no answer to learn from: {name_some(missing)}; "
            "supervised training needs data with answers (data.answer_column, or a generator that lists them), or "
            "sft.demonstrations"
        )
    answers = [text for text in texts if text]
    encoded = encode_answers(answers, tokenizer)
    unreadable = [
        prompt.id
        for prompt, answer, tokens in zip(prompts, answers, encoded, strict=True)
        if not tokens or has_unknown(answer, tokens, tokenizer)
    ]
    if unreadable:
        raise UserError(
            f"the tokenizer cannot write the answers of {len(unreadable):,} of {len(prompts):,} prompts: "
            f"{name_some(unreadable)}; use a tokenizer that knows their characters"
        )
    return tuple(
        RolloutGroup(
            prompt, (Response(np.array([*tokens, eos_token_id]), text=answer, finish_reason=FinishReason.EOS),)
        )
        for prompt, answer, tokens in zip(prompts, answers, encoded, strict=True)
    )
