"""Rows of Parquet and Arrow files, as plain Python values."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from ratoon.data.rows import cause_of, short_repr
from ratoon.types.errors import UserError

_ROWS_AT_A_TIME = 1_024
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, columns) of a Parquet file; rows are counted from 1, structs are dicts and lists are lists.

    Raises UserError naming file, row and column for a damaged file and for values that Python cannot hold.
    """
    with _damage_named(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        _check_names(path, file.schema_arrow)
        yield from _rows(path, file.iter_batches(batch_size=_ROWS_AT_A_TIME))


def read_arrow(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, columns) of an Arrow file, in the stream format (as the datasets package saves) or the file format."""
    with _damage_named(path, "Arrow"), pa.memory_map(str(path)) as memory:
        head = memory.read(len(_FILE_MAGIC))
        if head == _FILE_MAGIC:
            with pa.ipc.open_file(memory) as file:
                _check_names(path, file.schema)
                yield from _rows(path, (file.get_batch(index) for index in range(file.num_record_batches)))
            return
        _check_end(path, memory)
        memory.seek(0)
        with pa.ipc.open_stream(memory) as stream:
            _check_names(path, stream.schema)
            yield from _rows(path, stream)


def _check_end(path: Path, memory: pa.MemoryMappedFile) -> None:
    """A stream cut between two batches would else read as a shorter one."""
    size = memory.size()
    memory.seek(max(size - len(_STREAM_END), 0))
    if memory.read() != _STREAM_END:
        raise UserError(
            f"{path}: not an Arrow stream, or cut short: its end mark is missing after {size:,} bytes; save or fetch "
            "it again"
        )


@contextmanager
def _damage_named(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, OSError) as error:
        # pyarrow says the same of a damaged file and of one of another format
        raise UserError(
            f"{path}: cannot be read as {kind}: {' '.join(cause_of(error).split())}; it is damaged, cut short or of "
            "another format: write or fetch it again"
        ) from None


def _check_names(path: Path, schema: pa.Schema) -> None:
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: the column {short_repr(twice[0])} stands twice; rename one")


def _rows(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, dict[str, Any]]]:
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_A_TIME):
            part = batch.slice(start, _ROWS_AT_A_TIME)
            yield from enumerate(_python_rows(path, part, first + start), start=first + start)
        first += batch.num_rows


def _python_rows(path: Path, batch: pa.RecordBatch, first: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except Exception:  # text that is not UTF-8, nanoseconds, years after 9999, time zones that nobody knows
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for number, value in enumerate(column, start=first):
                try:
                    value.as_py()
                except Exception as error:
                    raise UserError(
                        f'{path}, row {number}: column "{name}" ({value.type}) holds a value that Python cannot '
                        f"read: {cause_of(error)}; convert or remove that column"
                    ) from None
        raise
