"""Sources read as `load_prompts` reads them, without a tokenizer."""

from pathlib import Path
from typing import Any

from ratoon.data.columns import source_row
from ratoon.data.config import DataConfig
from ratoon.data.rows import SourceRow
from ratoon.data.source_files import read_files


def read(path: Path, **settings: Any) -> list[SourceRow]:
    """Every row of a file, folder or pattern."""
    (source,) = DataConfig(source=str(path), **settings).each_source()
    rows = read_files(source, base_dir=path.parent)
    return [source_row(row.values, source, id=row.id, where=row.where) for row in rows]
