"""A function of the user that says which rows to keep."""

from pathlib import Path

import numpy as np

from ratoon.data.config import Source
from ratoon.data.rows import SourceRow, cause_of, short_repr
from ratoon.data.user_function import UserFunction, load_function, python_target
from ratoon.types.errors import UserError

_ALWAYS_KNOWN = ("prompt", "answer", "metadata")


class RowFilter:
    """Keeps the rows for which the function returns true."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function

    @classmethod
    def load(cls, source: Source, *, base_dir: Path) -> "RowFilter | None":
        """The filter of a source, None where it has none. Raises UserError for a function that cannot be had."""
        target = None if source.filter is None else python_target(source.filter)
        if target is None:
            return None
        key = f"{source.key}.filter"
        return cls(load_function(*target, base_dir=base_dir, key=key, kind="filter", needs="prompt"))

    def __call__(self, row: SourceRow) -> bool:
        """Raises UserError, with the row's id, where the function fails or returns anything but true or false."""
        self._function.check_names(_ALWAYS_KNOWN, row.metadata, row.id)
        known = {**row.metadata, "prompt": row.prompt_text, "answer": row.answer, "metadata": dict(row.metadata)}
        try:
            kept = self._function(known)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # exit() and asyncio.CancelledError too
            raise UserError(f"{self._function.label} failed for {row.id}: {cause_of(error)}") from error
        if not isinstance(kept, bool | np.bool_):
            raise UserError(
                f"{self._function.label} returned {short_repr(kept)} for {row.id}; return True to keep the row, "
                "or False"
            )
        return bool(kept)
