"""Rows of JSON files: one object a line, or one array of objects."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ratoon.data.columns import kind_of
from ratoon.data.rows import short_repr
from ratoon.data.text_lines import numbered_lines
from ratoon.types.errors import UserError

_OBJECT_HINT = 'such as {"prompt": "...", "answer": "..."}'


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, columns) of every row, one JSON object a line; lines of white space are skipped.

    Raises UserError naming file, line (counted from 1), what was found and what to do.
    """
    for line, text in numbered_lines(path):
        if text.strip():
            where = f"{path}, line {line}"
            values = _parse(text, where, "each line must be one whole JSON object")
            if not isinstance(values, dict):
                raise UserError(
                    f"{where}: {kind_of(values)} where an object is needed; each line must be one, {_OBJECT_HINT}"
                )
            yield line, values


def begins_with_array(path: Path) -> bool:
    """Whether a JSON file is one array rather than one object a line."""
    with path.open("rb") as file:
        return file.read(4_096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def read_json_array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(item, columns) of a file that is one array of objects; items are counted from 1."""
    text = "".join(text for _, text in numbered_lines(path))
    items = _parse(text, str(path), "the file must be one whole JSON array, or one object a line")
    for number, values in enumerate(items, start=1):
        if not isinstance(values, dict):
            raise UserError(
                f"{path}, item {number}: {kind_of(values)} where an object is needed; each item must be one, "
                f"{_OBJECT_HINT}"
            )
        yield number, values


def _parse(text: str, where: str, wanted: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{where}: broken JSON at {place}: {error.msg}; {wanted}") from None
    except (ValueError, RecursionError) as error:  # NaN, 5,000 digits, endless nesting, a key twice
        raise UserError(f"{where}: not readable as JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {short_repr(twice)} stands twice in one object; keep one")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
