"""Prompts as the policy reads them: rendered text and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratoon.data.config import PROMPT_PLACE, DataConfig
from ratoon.data.rows import SourceRow, cause_of, name_some, short_repr
from ratoon.types.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Llama 3, gpt-oss and others print the day; a run resumed tomorrow must see today's prompts.
_FIXED_DATE = (2025, 1, 1)


def render_texts(rows: Sequence[SourceRow], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the policy is given for each row, special tokens of the chat template included."""
    bodies = [config.prompt_template.replace(PROMPT_PLACE, row.prompt) for row in rows]
    if not config.chat_template:
        return bodies
    if not tokenizer.chat_template:
        raise UserError(
            "data.chat_template = true, but this tokenizer has no chat template; "
            "set data.chat_template = false to train on raw text, or use a chat model"
        )
    texts = [_render_chat(row, body, config, tokenizer) for row, body in zip(rows, bodies, strict=True)]
    for what, part in (("data.system_prompt", config.system_prompt), ("the prompt", bodies[0])):
        if part is not None and part.strip() not in texts[0]:
            raise UserError(
                f"{what} does not appear in the text that the chat template makes of {rows[0].id}: "
                f"{short_repr(texts[0])}; this template leaves it out: set data.chat_template = false and write "
                "data.prompt_template"
            )
    return texts


def _render_chat(row: SourceRow, body: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": body}]
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, strftime_now=_fixed_date
        )
    except Exception as error:  # templates are programs from the model folder: they raise what they like
        raise UserError(
            f"{row.id}: the tokenizer's chat template refuses the prompt: {cause_of(error)}; "
            "drop data.system_prompt if the template knows no system role, or set data.chat_template = false"
        ) from error
    assert isinstance(text, str), f"apply_chat_template(tokenize=False) returned {type(text).__name__}"
    return text


def _fixed_date(pattern: str) -> str:
    from datetime import date

    return date(*_FIXED_DATE).strftime(pattern)


def encode_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> list[list[int]]:
    """Token ids of each text, ready to be continued.

    Chat templates write their own special tokens; raw text gets what the tokenizer puts in front (BOS), but not an
    EOS behind, after which nothing would be left to say.
    """
    encoded = _encode(texts, tokenizer, add_special_tokens=not is_chat)
    eos = tokenizer.eos_token_id
    closed = [index for index, tokens in enumerate(encoded) if tokens and tokens[-1] == eos]
    bare = _encode([texts[index] for index in closed], tokenizer, add_special_tokens=False)
    for index, tokens in zip(closed, bare, strict=True):
        if not tokens or tokens[-1] != eos:
            encoded[index] = encoded[index][:-1]
    return encoded


def encode_answers(answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each answer by itself, without special tokens, as they follow a prompt's tokens."""
    return _encode(answers, tokenizer, add_special_tokens=False)


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[list[int]]:
    if not texts:
        return []
    batch = tokenizer(
        list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, truncation=False, verbose=False
    )
    return [list(tokens) for tokens in batch["input_ids"]]


def has_unknown(text: str, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether part of `text` became the unknown token."""
    unknown, unknown_id = tokenizer.unk_token, tokenizer.unk_token_id
    if unknown is None or not isinstance(unknown_id, int):
        return False
    written = text.count(str(unknown))  # some tokenizers use one token for unknown, BOS and EOS
    return list(tokens).count(unknown_id) > written


def lost_characters(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Characters of `texts` that become no token at all: a tokenizer without an unknown token skips what it lacks."""
    characters = sorted(character for character in set().union(*texts) if not character.isspace())
    encoded = _encode(characters, tokenizer, add_special_tokens=False)
    return frozenset(character for character, tokens in zip(characters, encoded, strict=True) if not tokens)


def readability_warnings(
    ids: Sequence[str], texts: Sequence[str], encoded: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """What of the prompts the policy cannot see.

    Raises UserError when every prompt is affected: then tokenizer and data do not belong together.
    """
    lost = lost_characters(texts, tokenizer)
    unknown_ids = [
        id for id, text, tokens in zip(ids, texts, encoded, strict=True) if has_unknown(text, tokens, tokenizer)
    ]
    lossy_ids = [id for id, text in zip(ids, texts, strict=True) if not lost.isdisjoint(text)]
    warnings: list[str] = []
    for affected, what in (
        (unknown_ids, f"hold words or characters that the tokenizer only knows as {tokenizer.unk_token}"),
        (lossy_ids, f"hold characters that the tokenizer drops ({name_some([ascii(c) for c in sorted(lost)])})"),
    ):
        if len(affected) == len(ids):
            raise UserError(f"all {len(ids):,} prompts {what}: this tokenizer cannot read this data")
        if affected:
            warnings.append(f"{len(affected):,} of {len(ids):,} prompts {what}: {name_some(affected)}")
    return warnings
