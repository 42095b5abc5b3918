"""Rows of CSV files as RFC 4180 has them: a header line, commas, and quotes that are doubled inside quotes."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratoon.data.rows import name_some, short_repr
from ratoon.data.text_lines import numbered_lines
from ratoon.types.errors import UserError

_MAX_FIELD_CHARACTERS = 2**31 - 1


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, columns) of every record: the line on which it begins, counted from 1; blank lines are skipped.

    Every value is text; quoted ones may hold commas, line breaks and doubled quotes. Raises UserError naming file and
    line for a header without names, for records of another length than the header, and for broken quotes.
    """
    records = _records(path)
    header_line, header = next(records, (1, []))
    _check_header(path, header_line, header)
    for line, fields in records:
        if len(fields) != len(header):
            raise UserError(
                f"{path}, line {line}: {len(fields)} fields where the header names {len(header)} "
                f"({name_some(header)}); quote fields that hold commas, and double the quotes inside them"
            )
        yield line, dict(zip(header, fields, strict=True))


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    # A limit of the whole process, and low: one long prompt would be "larger than field limit".
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    reader = csv.reader((text for _, text in numbered_lines(path)), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{path}, line {line}: broken CSV: {error}; quote fields that hold commas, quotes or line breaks, and "
                "double the quotes inside them"
            ) from None
        if fields:
            yield line, fields


def _check_header(path: Path, line: int, header: list[str]) -> None:
    where = f"{path}, line {line}"
    if not header:
        raise UserError(f"{path} has no rows; a CSV file begins with a header line that names its columns")
    if len(header) == 1:
        for separator, name in ((";", "semicolons"), ("\t", "tabs")):
            if separator in header[0]:
                raise UserError(f"{where}: columns are separated by {name}; save the file with commas")
    unnamed = [number for number, name in enumerate(header, start=1) if not name.strip()]
    if unnamed:
        raise UserError(
            f"{where}: the header has no name for column {unnamed[0]}; the first line must name every column"
        )
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise UserError(f"{where}: the header names {short_repr(twice[0])} twice; rename one")
