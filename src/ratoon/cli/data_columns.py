"""Which columns of a user's data are the prompt and the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ratoon.data.columns import source_row
from ratoon.data.config import DataConfig
from ratoon.data.rows import name_some
from ratoon.data.source_files import read_files
from ratoon.types.errors import UserError

# By what they are called in data sets that people share, the plainest first.
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "conversations")
_ANSWERS = ("answer", "final_answer", "ground_truth", "target", "label", "solution", "output", "response", "completion")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLook:
    """What a recipe must say of a data file."""

    prompt_column: str

    answer_column: str
    """Empty where the data has none."""

    num_rows: int
    longest_prompt: int
    """In characters."""

    is_conversation: bool
    """The first row's prompt is a list of messages, for which a chat template is needed."""


def look_at_data(
    source: str, *, base_dir: Path, prompt_column: str | None, answer_column: str | None, needs_answer: bool
) -> DataLook:
    """Reads all of a file.

    prompt_column, answer_column: as the user says; None finds them by their names in the first row.
    Raises UserError where the file cannot be read, or a column is not found or is no prompt or answer.
    """
    (found,) = DataConfig(source=source).each_source()
    rows = read_files(found, base_dir=base_dir)
    first = next(rows)
    prompt = prompt_column or _column(first.values, _PROMPTS)
    answer = _column(first.values, _ANSWERS, but=prompt) if answer_column is None else answer_column
    for what, column, is_needed in (("prompt", prompt, True), ("answer", answer, needs_answer)):
        if is_needed and not column:
            raise UserError(
                f"none of the columns of {source} is called like {'a prompt' if what == 'prompt' else 'an answer'}: "
                f"{name_some(sorted(first.values)) or 'there is none'}; name it with --{what}-column"
            )
    (found,) = DataConfig(source=source, prompt_column=prompt or "", answer_column=answer or "").each_source()
    row = source_row(first.values, found, id=first.id, where=first.where)
    lengths = [len(row.prompt_text), *(_num_characters(other.values.get(found.prompt_column)) for other in rows)]
    return DataLook(
        prompt_column=found.prompt_column,
        answer_column=found.answer_column,
        num_rows=len(lengths),
        longest_prompt=max(lengths),
        is_conversation=not isinstance(row.prompt, str),
    )


def _column(values: Mapping[str, Any], names: Sequence[str], but: str | None = None) -> str | None:
    """The first of `names` that a column has, in whatever case."""
    by_name = {column.lower(): column for column in values if column != but}
    return next((by_name[name] for name in names if name in by_name), None)


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(map(_num_characters, _parts(value)))


def _parts(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(cast(dict[str, object], value).values())
    return cast(list[object], value) if isinstance(value, list) else ()
