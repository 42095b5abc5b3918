"""Lines of text files, decoded one by one so that an error names its line."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ratoon.types.errors import UserError

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line of `path` with its number, from 1, and its line break; `.gz` is unpacked on the way.

    Raises UserError naming file and line for what is not UTF-8, and for a compressed file that is damaged.
    """
    line = 0
    try:
        with _open(path) as file:
            for line, raw in enumerate(file, start=1):
                yield line, _decode(raw.removeprefix(_UTF8_BOM) if line == 1 else raw, f"{path}, line {line}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path}: damaged or cut short after line {line} ({error}); fetch or compress it again"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        kind = " but UTF-16" if raw.startswith(_UTF16_BOMS) else ""
        raise UserError(
            f"{where}: not UTF-8{kind} (byte 0x{raw[error.start]:02x} at position {error.start}); save the file as "
            "UTF-8"
        ) from None
