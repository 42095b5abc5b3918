"""The recipe that a command is given."""

from collections.abc import Sequence
from pathlib import Path

from ratoon.config import load_recipe
from ratoon.config.recipe import Recipe
from ratoon.types.errors import UserError


def read_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe in `path` with `--a.b=v` overrides. Raises UserError naming file, key, value and what is allowed."""
    if path.is_fifo() and Path("/dev") not in path.absolute().parents:
        raise UserError(f"{path} is a named pipe, not a file; give the path of a TOML file")
    return load_recipe(path, overrides)
