"""One row of a source, before it is rendered and tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.types.errors import UserError

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One item of a file or generator."""

    id: str
    """Becomes the prompt's id: source and row, such as `"sums.jsonl:17"`."""

    prompt: str
    """Not empty, and encodable as UTF-8."""

    answer: str | None
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        for what, text in (("prompt", self.prompt), ("answer", self.answer)):
            if text is not None and not is_unicode(text):
                raise UserError(
                    f"{self.id}: the {what} holds half of a surrogate pair, which is no character; "
                    "it was probably cut inside an emoji: repair or remove the row"
                )
        if not self.prompt.strip():
            raise UserError(f"{self.id}: the prompt is empty; remove the row or fill it in")


def is_unicode(text: str) -> bool:
    """Whether every code point of `text` is a character that UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def name_some(names: Sequence[object]) -> str:
    """The first few of `names` and how many more there are."""
    shown = ", ".join(str(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"
