"""What looks wrong in rows that are well formed, counted while they are read, for a person to judge."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING

from ratoon.data.columns import kind_of
from ratoon.data.rows import SourceRow, name_some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]")
_MOJIBAKE = re.compile("\u00c3[\u0080-\u00bf]|\u00e2\u20ac")
_WRITTEN_CONVERSATION = re.compile(r"\s*\[\s*\{\s*[\"'](role|content|from|value)[\"']\s*:")
_LONG_ANSWER_CHARACTERS = 10_000
_TELLING_ANSWER_CHARACTERS = 12
"""From this length on, an answer that stands in its own prompt is no accident; short ones are often quoted."""

_NAMED = 6


class Suspicions:
    """Rows and columns to look at."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        specials = sorted({str(token) for token in tokenizer.all_special_tokens if str(token)})
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None
        self._ids: dict[str, list[str]] = {}
        self._counts: Counter[str] = Counter()
        self._kinds: dict[str, dict[str, str]] = {}
        self._alike: set[bytes] = set()
        self._num_rows = 0
        self.num_conflicts = 0
        """Duplicates whose answer is not that of the row that was kept."""

    def look_at(self, row: SourceRow) -> None:
        """A row whose prompt is no duplicate."""
        self._num_rows += 1
        text, answer = row.prompt_text, row.answer
        if self._specials is not None and self._specials.search(text):
            self._note("prompts spell out special tokens of the tokenizer, which will act", row)
        if _CONTROL.search(text):
            self._note("prompts hold control characters, or the mark that stands for a character lost", row)
        if _MOJIBAKE.search(text):
            self._note("prompts look like UTF-8 that was once read in another encoding", row)
        if isinstance(row.prompt, str) and _WRITTEN_CONVERSATION.match(text):
            self._note("prompts are conversations written out as text, which are not taken apart", row)
        if answer is not None:
            self._look_at_answer(row, text, answer)
        words = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()
        if words in self._alike:
            self._note("prompts differ from another in nothing but white space", row)
        self._alike.add(words)
        for column, value in row.metadata.items():
            self._kinds.setdefault(column, {}).setdefault(kind_of(value), row.id)

    def warnings(self) -> list[str]:
        """One sentence for each kind."""
        found: list[str] = []
        if self.num_conflicts:
            found.append(f"{self.num_conflicts:,} removed duplicates have another answer than the row that was kept")
        for what, count in self._counts.items():
            names = name_some(self._ids[what] + [""] * (count - len(self._ids[what])))
            found.append(f"{count:,} of {self._num_rows:,} {what}: {names}")
        for column, kinds in self._kinds.items():
            kinds = {kind: id for kind, id in kinds.items() if kind != "null"}
            if len(kinds) > 1:
                shown = ", ".join(f"{kind} ({id})" for kind, id in kinds.items())
                found.append(f'column "{column}" is of several types: {shown}')
        return found

    def _look_at_answer(self, row: SourceRow, text: str, answer: str) -> None:
        bare = answer.strip()
        if not bare:
            self._note("prompts have an empty answer", row)
        elif len(bare) >= _TELLING_ANSWER_CHARACTERS and bare in text:
            self._note("prompts contain their answer", row)
        if len(answer) > _LONG_ANSWER_CHARACTERS:
            self._note(f"prompts have an answer of more than {_LONG_ANSWER_CHARACTERS:,} characters", row)

    def _note(self, what: str, row: SourceRow) -> None:
        self._counts[what] += 1
        ids = self._ids.setdefault(what, [])
        if len(ids) < _NAMED:
            ids.append(row.id)
