"""`ratoon train`."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ratoon.cli.complaint import complain
from ratoon.config import load_recipe
from ratoon.types.errors import UserError


def train(recipe_path: Path, overrides: Sequence[str], *, fresh: bool) -> int:
    """Reads the recipe, then trains. Returns the exit status."""
    if recipe_path.is_fifo() and Path("/dev") not in recipe_path.absolute().parents:
        raise UserError(f"{recipe_path} is a named pipe, not a file; give the path of a TOML file")
    recipe = load_recipe(recipe_path, overrides)
    # After the recipe is known to be good: this import takes seconds.
    from ratoon.loop.run import RunFailedError, train

    command = shlex.join(["ratoon", "train", str(recipe_path), *overrides])
    try:
        return train(recipe, recipe_dir=recipe_path.resolve().parent, command=command, fresh=fresh)
    except RunFailedError as error:
        complain("train", error)
        return 1
