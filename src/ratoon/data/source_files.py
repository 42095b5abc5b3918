"""From what a recipe calls its source to the files it stands for, and their rows."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ratoon.data.arrow_files import read_arrow, read_parquet
from ratoon.data.config import FILE_SUFFIXES, Source
from ratoon.data.csv_files import read_csv
from ratoon.data.dataset_folders import split_files
from ratoon.data.jsonl import begins_with_array, read_json_array, read_jsonl
from ratoon.data.rows import name_some
from ratoon.data.user_paths import resolve_path
from ratoon.types.errors import UserError

_MAGIC = "*?["

Read = Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class FileRow:
    """One row of a file, before its columns are looked at."""

    id: str
    where: str
    """File and row, for errors."""

    values: dict[str, Any]


def read_files(source: Source, *, base_dir: Path) -> Iterator[FileRow]:
    """The first `max_rows` rows of a source, or all, file after file.

    Raises UserError naming file, row and what to do for whatever cannot be read, and where there is no row at all.
    """
    files = find_files(source, base_dir=base_dir)
    rows = islice((row for path, label in files for row in _file_rows(path, label)), source.max_rows)
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        named = files[0][0] if len(files) == 1 else f"{source.key}.source {source.source}"
        raise UserError(f"{named} has no rows; it needs at least one, with a prompt")


def find_files(source: Source, *, base_dir: Path) -> list[tuple[Path, str]]:
    """(path, what the ids of its rows begin with) of every file of a source, in order."""
    key = f"{source.key}.source"
    path = resolve_path(source.source, base_dir=base_dir, key=key)
    if path.is_dir():
        paths, root = split_files(path, source.split, key=source.key), path
    elif path.exists() or path.is_symlink():
        return [(_checked(path, key), source.name)]
    elif any(sign in source.source for sign in _MAGIC):
        paths, root = _matching(source.source, base_dir, key)
    else:
        raise UserError(f"{key} {path} does not exist; {_neighbours(path)}")
    if source.split is not None and not path.is_dir():
        raise UserError(f"{source.key}.split cannot act on {path}: only dataset folders have splits; remove it")
    is_only_pattern = source.key == "data" and not path.is_dir()
    prefix = "" if is_only_pattern else f"{source.name}/"
    return [(_checked(found, key), f"{prefix}{found.relative_to(root)}") for found in paths]


def _file_rows(path: Path, label: str) -> Iterator[FileRow]:
    unit, read = _format(path)
    for number, values in read(path):
        yield FileRow(f"{label}:{number}", f"{path}, {unit} {number}", values)


def _format(path: Path) -> tuple[str, Read]:
    """(what its rows are called, how they are read)."""
    match path.name.removesuffix(".gz").rpartition(".")[2]:
        case "csv":
            return "line", read_csv
        case "parquet":
            return "row", read_parquet
        case "arrow":
            return "row", read_arrow
        case "json" if begins_with_array(path):
            return "item", read_json_array
    return "line", read_jsonl


def _checked(path: Path, key: str) -> Path:
    if not path.exists():
        raise UserError(f"{key} {path} is a link to {path.readlink()}, which does not exist; mend or remove the link")
    if not path.is_file():
        raise UserError(f"{key} {path} is not a regular file, which can be read again to resume; save it as one")
    if not path.name.endswith(FILE_SUFFIXES):
        raise UserError(
            f"{key} {path} must end in {', '.join(FILE_SUFFIXES)}, be a dataset folder or a generator "
            '("reasoning-gym:NAME"); convert other formats to one JSON object a line'
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{key} {path} cannot be read: {error.strerror}; mend that, or name another file") from None
    return path


def _matching(pattern: str, base_dir: Path, key: str) -> tuple[list[Path], Path]:
    """(files that match, the folder from which the pattern begins)."""
    parts = Path(pattern).parts
    first = next(index for index, part in enumerate(parts) if any(sign in part for sign in _MAGIC))
    root = resolve_path(str(Path(*parts[:first])), base_dir=base_dir, key=key)
    try:
        found = sorted(path for path in root.glob(str(Path(*parts[first:]))) if not path.name.startswith("."))
    except (ValueError, OSError) as error:
        raise UserError(f"{key} {pattern}: not a pattern of files: {error}") from None
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise UserError(f"{key} {pattern}: no file matches; {_neighbours(root / '*')}")
    return files, root


def _neighbours(path: Path) -> str:
    """What a person who misspelt `path` may have meant."""
    if not path.parent.is_dir():
        return f"nor does the folder {path.parent}; paths are relative to the recipe"
    there = sorted(found for found in path.parent.glob("*") if not found.name.startswith("."))
    names = [found.name for found in there if found.name.endswith(FILE_SUFFIXES)]
    names += [found.name for found in there if found.is_dir()]
    close = difflib.get_close_matches(path.name, names) or names
    return f"{path.parent} has {name_some(close) if close else 'no data file'}; paths are relative to the recipe"
