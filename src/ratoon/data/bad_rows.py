"""Every row that `load_prompts` would refuse for its prompt or answer, where training stops at the first."""

from pathlib import Path

from ratoon.data.columns import source_row
from ratoon.data.config import DataConfig
from ratoon.data.source_files import read_files
from ratoon.types.errors import UserError


def find_bad_rows(config: DataConfig, *, base_dir: Path) -> tuple[list[str], int]:
    """(what is wrong with each bad row, the number of all rows), over the files of every source, in order.

    Raises UserError for a file that cannot be read.
    """
    complaints: list[str] = []
    num_rows = 0
    for source in config.each_source():
        if source.generator is not None:
            continue
        for found in read_files(source, base_dir=base_dir):
            num_rows += 1
            try:
                source_row(found.values, source, id=found.id, where=found.where)
            except UserError as error:
                complaints.append(str(error))
    return complaints, num_rows
