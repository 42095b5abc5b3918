"""Prompts as the policy reads them: rendered text and token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ratoon.data.config import PROMPT_PLACE, Source
from ratoon.data.rows import SourceRow, cause_of, name_some, short_repr
from ratoon.types.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Llama 3, gpt-oss and others print the day; a run resumed tomorrow must see today's prompts.
_FIXED_DATE = (2025, 1, 1)


class Renderer:
    """Turns the rows of one source into what the policy is given."""

    def __init__(self, source: Source, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> None:
        if is_chat and not tokenizer.chat_template:
            raise UserError(
                "data.chat_template = true, but this tokenizer has no chat template; "
                "set data.chat_template = false to train on raw text, or use a chat model"
            )
        self._source = source
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._num_rows = 0
        self.num_own_system_prompts = 0
        """Conversations that begin with a system message of their own, which `system_prompt` does not replace."""

    def __call__(self, row: SourceRow) -> str:
        """The text of a row, special tokens of the chat template included."""
        body = row.last_text
        if self._source.prompt_template != PROMPT_PLACE:
            body = self._source.prompt_template.replace(PROMPT_PLACE, body)
        if not self._is_chat:
            if not isinstance(row.prompt, str):
                raise UserError(
                    f"{row.id}: the prompt is a conversation, which only a chat template can render; set "
                    f"data.chat_template = true, or another {self._source.key}.prompt_column"
                )
            return body
        text = self._render_chat(row, self._messages(row, body))
        if self._num_rows == 0:
            self._check_visible(row, body, text)
        self._num_rows += 1
        return text

    def check_system_prompt(self) -> None:
        """To be called after the last row: a system prompt that no row took is refused."""
        if self._source.system_prompt is not None and 0 < self._num_rows == self.num_own_system_prompts:
            raise UserError(
                f"{self._source.key}.system_prompt cannot act: each of the {self._num_rows:,} conversations of "
                f'"{self._source.name}" begins with a system message of its own; remove it'
            )

    def _messages(self, row: SourceRow, body: str) -> list[dict[str, str]]:
        if isinstance(row.prompt, str):
            messages = [{"role": "user", "content": body}]
        else:
            messages = [{"role": message.role, "content": message.content} for message in row.prompt]
            messages[-1]["content"] = body
        if self._source.system_prompt is not None:
            if messages[0]["role"] in ("system", "developer"):
                self.num_own_system_prompts += 1
            else:
                messages.insert(0, {"role": "system", "content": self._source.system_prompt})
        return messages

    def _render_chat(self, row: SourceRow, messages: list[dict[str, str]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, strftime_now=_fixed_date
            )
        except Exception as error:  # templates are programs from the model folder: they raise what they like
            raise UserError(
                f"{row.id}: the tokenizer's chat template refuses the prompt: {cause_of(error)}; "
                "drop data.system_prompt if the template knows no system role, or set data.chat_template = false"
            ) from error
        assert isinstance(text, str), f"apply_chat_template(tokenize=False) returned {type(text).__name__}"
        return text

    def _check_visible(self, row: SourceRow, body: str, text: str) -> None:
        system_prompt = None if self.num_own_system_prompts else self._source.system_prompt
        for what, part in ((f"{self._source.key}.system_prompt", system_prompt), ("the prompt", body)):
            if part is not None and part.strip() not in text:
                raise UserError(
                    f"{what} does not appear in the text that the chat template makes of {row.id}: "
                    f"{short_repr(text)}; this template leaves it out: set data.chat_template = false and write "
                    "data.prompt_template"
                )


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


def lost_characters(characters: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Those that become no token at all: a tokenizer without an unknown token skips what it lacks."""
    visible = sorted(character for character in characters if not character.isspace())
    encoded = _encode(visible, tokenizer, add_special_tokens=False)
    return frozenset(character for character, tokens in zip(visible, encoded, strict=True) if not tokens)


class Readability:
    """What of the prompts the policy cannot see."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._unknown_ids: list[str] = []
        self._characters: set[str] = set()

    def look_at(self, id: str, text: str, tokens: Sequence[int]) -> None:
        """A rendered prompt and its tokens."""
        self._characters.update(text)
        if has_unknown(text, tokens, self._tokenizer):
            self._unknown_ids.append(id)

    def warnings(self, texts: Mapping[str, str]) -> list[str]:
        """texts: id of the row by text, of every prompt that was looked at.

        Raises UserError when every prompt is affected: then tokenizer and data do not belong together.
        """
        lost = lost_characters(self._characters, self._tokenizer)
        lossy_ids = [id for text, id in texts.items() if not lost.isdisjoint(text)] if lost else []
        warnings: list[str] = []
        for affected, what in (
            (
                self._unknown_ids,
                f"hold words or characters that the tokenizer only knows as {self._tokenizer.unk_token}",
            ),
            (lossy_ids, f"hold characters that the tokenizer drops ({name_some([ascii(c) for c in sorted(lost)])})"),
        ):
            if len(affected) == len(texts):
                raise UserError(f"all {len(texts):,} prompts {what}: this tokenizer cannot read this data")
            if affected:
                warnings.append(f"{len(affected):,} of {len(texts):,} prompts {what}: {name_some(affected)}")
        return warnings
