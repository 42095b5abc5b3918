"""Paths as recipes write them."""

from contextlib import suppress
from pathlib import Path

from ratoon.data.rows import short_repr
from ratoon.types.errors import UserError


def resolve_path(text: str, *, base_dir: Path, key: str) -> Path:
    """`text` relative to `base_dir`, with `~` expanded; there need be nothing at it.

    key: the recipe's key that holds it. Raises UserError for what no file system can look up: an unknown user's
    home, a name too long, a NUL, a loop of links, a folder that may not be entered.
    """
    try:
        path = base_dir / Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{key}: {short_repr(text)} cannot be looked up ({reason}); give another path") from error
