"""`ratoon train`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.cli.complaint import complain
from ratoon.cli.launch import is_a_rank, is_first_of_host, leave_to_launcher, num_ranks, run_ranks
from ratoon.cli.recipe_file import read_recipe
from ratoon.config.recipe import Recipe
from ratoon.loop.origin import folder_of_files
from ratoon.types.errors import UserError

_EXAMPLE = """\
example:
  ratoon train recipes/quickstart.toml
  ratoon train recipes/quickstart.toml --trainer.num_steps 10 --run.name=short

The same command again resumes the run. Any key of the recipe can be set as --section.key=value; docs/recipes.md
lists them. The run is written to runs/NAME (run.output_dir and run.name).

All GPUs of this host train together, unless CUDA_VISIBLE_DEVICES or trainer.num_processes says otherwise. On several
hosts: torchrun ... -m ratoon.cli.main train RECIPE.toml, with run.output_dir in a folder that all of them share.
"""


EXIT_WRONG = 2
"""Something the user must change."""


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
    try:
        recipe = read_recipe(known.recipe, overrides)
    except UserError:
        if is_first_of_host():
            raise
        return EXIT_WRONG
    if not is_a_rank() and (count := num_ranks(recipe.trainer)) > 1:
        fresh = ["--fresh"] if known.fresh else []
        command = ["train", str(known.recipe), *fresh, *overrides]
        return run_ranks([sys.executable, "-m", "ratoon.cli.main", *command], count)
    return _train(known, overrides, recipe)


def _train(known: argparse.Namespace, overrides: Sequence[str], recipe: Recipe) -> int:
    # After the recipe is known to be good: this import takes seconds.
    from ratoon.distributed import CollectiveError, OtherRankError
    from ratoon.loop.run import RunFailedError, train

    command = shlex.join(["ratoon", "train", str(known.recipe), *overrides])
    try:
        return train(recipe, recipe_dir=folder_of_files(known.recipe), command=command, fresh=known.fresh)
    except RunFailedError as error:
        if not (error.is_another_ranks and leave_to_launcher(error)):
            complain("train", error)
        return 1
    except CollectiveError as error:  # before the run has a log
        if not leave_to_launcher(error):
            complain("train", error)
        return 1
    except OtherRankError as error:  # which has complained
        return EXIT_WRONG if error.is_users else 1
