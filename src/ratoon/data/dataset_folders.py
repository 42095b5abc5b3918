"""Hugging Face dataset folders on disk, read as files: no code in them is ever run.

Two kinds: what `save_to_disk` writes (`state.json` beside Arrow shards; a folder of these for each split), and
snapshots of the hub (Parquet, JSON or CSV files whose names or folders tell the split).
"""

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ratoon.data.config import FILE_SUFFIXES
from ratoon.data.rows import name_some, short_repr
from ratoon.types.errors import UserError

_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
_ABOUT_THE_DATA = (_DICT_FILE, _STATE_FILE, "dataset_info.json", "dataset_infos.json", "config.json")
_SHARD = re.compile(r"(?P<name>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\b")
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


def split_files(folder: Path, split: str | None, *, key: str) -> list[Path]:
    """The files of one split of `folder`, in order.

    split: None takes the only split there is, or `train`. key: the recipe's table that names the folder.
    Raises UserError for a folder that holds a loading script or no data, for a split that it lacks, for missing
    shards, and where it is not clear which files are meant.
    """
    try:
        return _split_files(folder, split, key)
    except OSError as error:
        raise UserError(
            f"{key}.source {folder}: {error.filename or folder} cannot be read: {error.strerror}"
        ) from error


def _split_files(folder: Path, split: str | None, key: str) -> list[Path]:
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if scripts:
        raise UserError(
            f"{key}.source {folder} holds {name_some(scripts)}: loading scripts are never run; name the data files "
            f'themselves, for example {key}.source = "{folder.name}/*.parquet"'
        )
    if (folder / _DICT_FILE).exists():
        splits = _strings(_read_json(folder / _DICT_FILE).get("splits"), folder / _DICT_FILE, "splits")
        chosen = folder / _choose_split(splits, split, folder, key)
        if not (chosen / _STATE_FILE).exists():
            raise UserError(
                f"{folder / _DICT_FILE} names the split {chosen.name}, but {chosen / _STATE_FILE} is missing"
            )
        return _saved_files(chosen)
    if (folder / _STATE_FILE).exists():
        own = _read_json(folder / _STATE_FILE).get("_split")
        if split is not None and split != own:
            raise UserError(
                f'{key}.split = "{split}", but {folder} is one split by itself ({own or "unnamed"}); remove it'
            )
        return _saved_files(folder)
    return _snapshot_files(folder, split, key)


def _saved_files(folder: Path) -> list[Path]:
    """The shards of a dataset that `save_to_disk` wrote."""
    state_file = folder / _STATE_FILE
    state = _read_json(state_file)
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder} keeps its rows' order in a file of its own; call flatten_indices() on the dataset and save it "
            "again"
        )
    entries = state.get("_data_files")
    items = cast(list[Any], entries) if isinstance(entries, list) else []
    names = _strings([item.get("filename") for item in items if isinstance(item, dict)], state_file, "_data_files")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {name_some(missing)}, which {_STATE_FILE} names; copy the whole folder again")
    return [folder / name for name in names]


def _snapshot_files(folder: Path, split: str | None, key: str) -> list[Path]:
    by_split: dict[str, list[Path]] = {}
    for path in _data_files(folder):
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    if not by_split:
        raise UserError(
            f"{key}.source {folder} is a folder without data: it has neither {_STATE_FILE} nor files that end in "
            f"{', '.join(FILE_SUFFIXES)}"
        )
    files = by_split[_choose_split(sorted(by_split), split, folder, key)]
    for what, found in (
        ("folders", {str(path.parent.relative_to(folder)) for path in files}),
        ("formats", {path.suffix for path in files}),
    ):
        if len(found) > 1:
            raise UserError(
                f"{key}.source {folder} has files of one split in several {what}: {name_some(sorted(found))}; name the "
                f'one that is meant, for example as a folder or a pattern ("{folder.name}/{sorted(found)[0]}")'
            )
    _check_shards(files)
    return files


def _data_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):  # follows no links, and so no loops
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place) / name
            for name in names
            if name.endswith(FILE_SUFFIXES) and not name.startswith(".") and name not in _ABOUT_THE_DATA
        ]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _split_of(path: Path) -> str:
    """What a file's name says, or else the folders that it is in, the innermost first."""
    shard = _SHARD.match(path.name)
    if shard:
        return _SPLIT_WORDS.get(shard["name"], shard["name"])
    for part in (path.name.partition(".")[0], *reversed(path.parent.parts)):
        for word in re.split(r"[^a-z0-9]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _check_shards(files: Sequence[Path]) -> None:
    shards = [match for path in files if (match := _SHARD.match(path.name))]
    for match in shards:
        count = int(match["count"])
        present = {int(other["index"]) for other in shards if other["count"] == match["count"]}
        missing = [f"{match['name']}-{index:05d}-of-{count:05d}" for index in range(count) if index not in present]
        if missing:
            raise UserError(f"{files[0].parent} lacks {name_some(missing)}; fetch the whole dataset again")


def _choose_split(splits: Sequence[str], split: str | None, folder: Path, key: str) -> str:
    if split is None:
        if len(splits) == 1:
            return splits[0]
        if "train" in splits:
            return "train"
        raise UserError(f"{folder} has the splits {name_some(splits)}; name one with {key}.split")
    if split not in splits:
        close = difflib.get_close_matches(split, splits)
        hint = f'; did you mean "{close[0]}"?' if close else "."
        raise UserError(f'{key}.split: {folder} has no split "{split}"{hint} Its splits are: {name_some(splits)}')
    return split


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}); save or copy the dataset again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object; save or copy the dataset again")
    return cast(dict[str, Any], values)


def _strings(values: Any, path: Path, key: str) -> list[str]:
    """File or folder names inside the dataset's folder, and nothing that leads out of it."""
    names = cast(list[Any], values) if isinstance(values, list) else []
    bad = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if bad or not names:
        raise UserError(f"{path}: {key} must list names in this folder, got {short_repr(values)}")
    return names
