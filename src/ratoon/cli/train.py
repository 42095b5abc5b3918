"""`ratoon train`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.cli.complaint import complain
from ratoon.cli.recipe_file import read_recipe
from ratoon.loop.origin import folder_of_files

_EXAMPLE = """\
example:
  ratoon train recipes/quickstart.toml
  ratoon train recipes/quickstart.toml --trainer.num_steps 10 --run.name=short

The same command again resumes the run. Any key of the recipe can be set as --section.key=value; docs/recipes.md
lists them. The run is written to runs/NAME (run.output_dir and run.name).
"""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "train",
        "train a policy as a recipe says, or resume its run",
        example=_EXAMPLE,
        run=_run,
        takes_overrides=True,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")


def _run(known: argparse.Namespace, overrides: Sequence[str]) -> int:
    recipe = read_recipe(known.recipe, overrides)
    # After the recipe is known to be good: this import takes seconds.
    from ratoon.loop.run import RunFailedError, train

    command = shlex.join(["ratoon", "train", str(known.recipe), *overrides])
    try:
        return train(recipe, recipe_dir=folder_of_files(known.recipe), command=command, fresh=known.fresh)
    except RunFailedError as error:
        complain("train", error)
        return 1
