"""Files that are either whole or absent, also after kill -9 and power loss."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Begins the name of whatever is being written or removed; nothing that begins so is ever read."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def fsync_file(path: Path) -> None:
    """Returns once the file's bytes are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: Path) -> None:
    """Returns once the folder's entries (not the files' bytes) are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Returns once every file and folder under `path` is on disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            fsync_file(Path(folder, name))
        fsync_folder(Path(folder))


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, has no room left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    try:
        message = str(error)
    except Exception:  # the error of a user's function may have none
        return False
    # safetensors and tokenizers, written in Rust, tell by the message of an error of their own.
    return any(f"(os error {number})" in message for number in _FULL)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, then puts it in the place of `path`.

    A reader sees the old file or the new one. Raises what `write` raises, the temporary file removed.
    """
    partial = path.with_name(PARTIAL_PREFIX + path.name)
    try:
        write(partial)
        fsync_file(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_folder(path.parent)
