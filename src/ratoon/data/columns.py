"""From a row's columns to a prompt, its answer and the rest."""

import decimal
import math
from collections.abc import Mapping
from typing import Any, cast

from ratoon.data.config import Source
from ratoon.data.conversations import parse_conversation
from ratoon.data.rows import SOURCE_KEY, SourceRow, is_unicode, name_some, short_repr
from ratoon.types.errors import UserError

_MAX_DEPTH = 100
"""Of lists and objects inside each other: what copies and sends rows descends by recursion."""

_MEDIA_KEYS = frozenset({"bytes", "path"})
"""Of the struct in which datasets keep images and sound."""


def source_row(values: Mapping[str, Any], source: Source, *, id: str, where: str) -> SourceRow:
    """The row as `source` names its columns. Its metadata is the whole row; as answers, numbers become their text.

    where: file and row, for errors. Raises UserError naming them, the column, what was found and what to do.
    """
    prompt = _prompt(_column(values, source.prompt_column, f"{source.key}.prompt_column", where), source, where)
    answer = _answer(values, source, where) if source.answer_column else None
    row = SourceRow(id=id, prompt=prompt, answer=answer, metadata=dict(values))
    for key, value in values.items():
        _check_value(key, value, where)
    return row


def kind_of(value: object) -> str:
    """What a value is, in the words of JSON where it has some."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float() | decimal.Decimal():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "an array"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def _prompt(value: Any, source: Source, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return parse_conversation(cast(list[Any], value), f'{where}: "{source.prompt_column}"')
    raise UserError(
        f'{where}: "{source.prompt_column}" must be text or a list of messages, got {kind_of(value)}; mend or remove '
        'the row, or set data.bad_rows = "drop"'
    )


def _answer(values: Mapping[str, Any], source: Source, where: str) -> str:
    column = source.answer_column
    answer = _column(values, column, f"{source.key}.answer_column", where)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | decimal.Decimal):
        raise UserError(
            f'{where}: "{column}" must be text or a number, got {kind_of(answer)}; if the data has no answers, or the '
            f'reward reads that column itself, set {source.key}.answer_column = ""'
        )
    if isinstance(answer, float | decimal.Decimal) and not math.isfinite(answer):
        raise UserError(f'{where}: "{column}" is {answer}, which is no answer; mend or remove the row')
    return str(answer)


def _column(values: Mapping[str, Any], column: str, key: str, where: str) -> Any:
    if column in values:
        return values[column]
    outer, *inner = column.split(".")
    found: Any = values.get(outer) if inner else None
    for name in inner:
        found = cast(dict[str, Any], found).get(name) if isinstance(found, dict) else None
    if found is None:
        hint = ' (or to "" if the data has no answers)' if key.endswith("answer_column") else ""
        raise UserError(
            f'{where}: no column "{column}"; its columns are {name_some(sorted(values)) or "none"}: '
            f"set {key} to the right one{hint}"
        )
    return found


def _check_value(key: str, value: Any, where: str) -> None:
    """Every column is kept for rewards and filters, which may name it."""
    if key == SOURCE_KEY:
        raise UserError(f'{where}: the column name "{SOURCE_KEY}" is reserved; rename the column')
    if not is_unicode(key) or (isinstance(value, str) and not is_unicode(value)):
        raise UserError(
            f"{where}: column {short_repr(key)} holds half of a surrogate pair, which is no character; repair it"
        )
    if _is_deeper(value, _MAX_DEPTH):
        raise UserError(
            f"{where}: column {short_repr(key)} holds lists or objects more than {_MAX_DEPTH} deep in each other; "
            "flatten or remove that column"
        )
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    if items and isinstance(items[0], dict) and cast(dict[Any, Any], items[0]).keys() == _MEDIA_KEYS:
        raise UserError(
            f'{where}: column "{key}" holds media (bytes and path); prompts are text only: if they make sense without '
            "it, remove the column"
        )


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists and objects stand in each other."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [item for outer in level if isinstance(outer, dict | list | tuple) for item in _items(outer)]
        if not level:
            return False
    return True


def _items(outer: Any) -> Any:
    return cast(dict[Any, Any], outer).values() if isinstance(outer, dict) else outer
