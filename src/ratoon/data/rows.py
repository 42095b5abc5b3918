"""One row of a source, before it is rendered and tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.types.errors import UserError

SOURCE_KEY = "ratoon_source"
"""In the metadata of prompts from several sources: the name of theirs. No column may be called so."""

_SHOWN = 5
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One item of a file or generator."""

    id: str
    """Becomes the prompt's id: source and row, such as `"sums.jsonl:17"`."""

    prompt: str | tuple[Message, ...]
    """Text, or a conversation. Not empty, and encodable as UTF-8."""

    answer: str | None
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        for what, text in (("prompt", self.prompt_text), ("answer", self.answer)):
            if text is not None and not is_unicode(text):
                raise UserError(
                    f"{self.id}: the {what} holds half of a surrogate pair, which is no character; "
                    "it was probably cut inside an emoji: repair or remove the row"
                )
        if not self.last_text.strip():
            raise UserError(f"{self.id}: the prompt is empty; remove the row or fill it in")

    @property
    def last_text(self) -> str:
        """The prompt, or the last message of the conversation that it is."""
        if isinstance(self.prompt, str):
            return self.prompt
        return self.prompt[-1].content if self.prompt else ""

    @property
    def prompt_text(self) -> str:
        """The prompt, or the messages of the conversation that it is, one after another."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(message.content for message in self.prompt)


def is_unicode(text: str) -> bool:
    """Whether every code point of `text` is a character that UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_some(names: Sequence[object]) -> str:
    """The first few of `names` and how many more there are."""
    shown = ", ".join(shorten(str(name)) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def shorten(text: str) -> str:
    """`text` as far as a message can hold it."""
    rest = len(text) - _SHOWN_CHARACTERS
    return text if rest <= 0 else f"{text[:_SHOWN_CHARACTERS]}... and {rest:,} more characters"


def short_repr(value: object) -> str:
    """`repr` as far as a message can hold it; the value may be anything."""
    try:
        return shorten(repr(value))
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def cause_of(error: BaseException) -> str:
    """Type and message of an error that somebody else's code raised, whose message may be anything."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:
        return f"{name}, whose message cannot be shown"
    return f"{name}: {shorten(message)}" if message else name
