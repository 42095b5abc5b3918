"""Rows of a JSON-lines file."""

import difflib
import json
from pathlib import Path
from typing import Any, NoReturn

from ratoon.data.rows import SourceRow, is_unicode, name_some, short_repr
from ratoon.types.errors import UserError

_UTF8_BOM = b"\xef\xbb\xbf"


def read_jsonl(path: Path, *, prompt_column: str, answer_column: str) -> list[SourceRow]:
    """Every row of `path`, one JSON object a line; lines of white space are skipped.

    answer_column: "" for rows without answers. Numbers become their decimal text.
    Raises UserError naming file, line (counted from 1), column, what was found and what to do.
    """
    rows: list[SourceRow] = []
    for line, raw in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if raw.strip():
            values = _parse_object(raw, f"{path}, line {line}")
            rows.append(_source_row(values, path, line, prompt_column, answer_column))
    if not rows:
        raise UserError(f"{path} has no rows; it needs one JSON object a line")
    return rows


def _read_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"data.source {path} is a folder; name a .jsonl file in it")
    try:
        return path.read_bytes().removeprefix(_UTF8_BOM)
    except FileNotFoundError:
        raise UserError(f"data.source {path} does not exist; {_neighbours(path)}") from None
    except OSError as error:
        raise UserError(f"data.source {path} cannot be read: {error.strerror}") from error


def _neighbours(path: Path) -> str:
    """What a person who misspelt `path` may have meant."""
    if not path.parent.is_dir():
        return f"nor does the folder {path.parent}; paths are relative to the recipe"
    names = sorted(found.name for found in path.parent.glob("*.jsonl"))
    close = difflib.get_close_matches(path.name, names) or names
    return f"{path.parent} has {name_some(close) if close else 'no .jsonl file'}; paths are relative to the recipe"


def _parse_object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: broken JSON at column {error.colno}: {error.msg}; each line must be one whole JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # NaN, 5,000 digits, endless nesting, a key twice
        raise UserError(f"{where}: not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{where}: a JSON {_kind(values)} where an object is needed; "
            'each line must be one object, such as {"prompt": "...", "answer": "..."}'
        )
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {short_repr(twice)} stands twice in one object; keep one")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _source_row(values: dict[str, Any], path: Path, line: int, prompt_column: str, answer_column: str) -> SourceRow:
    where = f"{path}, line {line}"
    prompt = _column(values, prompt_column, "data.prompt_column", where)
    if not isinstance(prompt, str):
        raise UserError(f'{where}: "{prompt_column}" must be text, got a JSON {_kind(prompt)}')
    answer = _answer(values, answer_column, where) if answer_column else None
    rest = {key: value for key, value in values.items() if key not in (prompt_column, answer_column)}
    for key, value in rest.items():
        if not is_unicode(key) or (isinstance(value, str) and not is_unicode(value)):
            raise UserError(
                f"{where}: column {short_repr(key)} holds half of a surrogate pair, which is no character; repair it"
            )
    return SourceRow(id=f"{path.name}:{line}", prompt=prompt, answer=answer, metadata=rest)


def _answer(values: dict[str, Any], column: str, where: str) -> str:
    answer = _column(values, column, "data.answer_column", where)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(
            f'{where}: "{column}" must be text or a number, got a JSON {_kind(answer)}; '
            'if the data has no answers, set data.answer_column = ""'
        )
    return str(answer)


def _column(values: dict[str, Any], column: str, key: str, where: str) -> Any:
    if column not in values:
        hint = ' (or to "" if the data has no answers)' if key == "data.answer_column" else ""
        raise UserError(
            f'{where}: no column "{column}"; its columns are {name_some(sorted(values)) or "none"}: '
            f"set {key} to the right one{hint}"
        )
    return values[column]


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
