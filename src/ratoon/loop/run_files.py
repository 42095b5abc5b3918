"""Whether what stands in a run's folder is of the kind that the run makes: a pipe would be waited for without end."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ratoon.trainer.rollout_table import rollout_step
from ratoon.types.errors import UserError

_FILES = ("lock", "recipe.toml", "origin.json", "metrics.jsonl", "reference.sha256")
_FOLDERS = ("checkpoints", "rollouts", "reference")


def check_run_files(path: Path, named: Path) -> None:
    """Opens nothing. Raises UserError for the first file that is none, or folder that is none. /dev/null is one.

    named: `path` as the recipe names it, for the message.
    """
    for entry, kind in _expected(path):
        if entry.exists() and not (entry.is_dir() if kind == "folder" else entry.is_file() or entry.is_char_device()):
            raise UserError(
                f"{named / entry.relative_to(path)} is {_kind_of(entry)}, and the run has a {kind} of that name; move "
                "it away, or start anew with --fresh (the old run is set aside)"
            )


def _expected(path: Path) -> Iterator[tuple[Path, Literal["file", "folder"]]]:
    for name in _FOLDERS:
        yield path / name, "folder"
    for file in (*(path / name for name in _FILES), *path.glob("*.log")):
        yield file, "file"
    for file in (path / "checkpoints").rglob("*"):
        if not file.is_dir():
            yield file, "file"
    if (path / "rollouts").is_dir():
        with os.scandir(path / "rollouts") as entries:  # asks the disk once, not for each of very many files
            for entry in entries:
                if entry.is_dir() and rollout_step(Path(entry.name)) is not None:
                    yield Path(entry.path), "file"


def _kind_of(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    if path.is_file():
        return "a file"
    return "a named pipe" if path.is_fifo() else "no file (a disk or a socket)"
