"""`ratoon plan`."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ratoon.cli.command import Commands, add_command
from ratoon.cli.complaint import complain
from ratoon.cli.launch import num_ranks
from ratoon.cli.recipe_file import read_recipe
from ratoon.loop.origin import folder_of_files
from ratoon.types.limits import MAX_PROCESSES

_EXAMPLE = """\
example:
  ratoon plan recipes/quickstart.toml
  ratoon plan recipes/quickstart.toml --full --rollout.group_size 64
  ratoon plan recipes/quickstart.toml --gpus 8 --gpu-memory-gib 80

Reads data, tokenizer, reward functions and the model's configuration, but no weights, and writes nothing. It says
what a step is made of, what it costs and what memory it needs, and what `ratoon train` would do with the run's
folder. It takes the same keys as `ratoon train`, and exits with 2 for what that would refuse.
"""

_MOST_GIB = 65_536


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "plan",
        "say what a recipe would do, without loading weights or writing files",
        example=_EXAMPLE,
        run=_run,
        takes_overrides=True,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--gpus", type=_num_gpus, metavar="K", help="plan for K GPUs that train together, here or not")
    parser.add_argument(
        "--gpu-memory-gib",
        type=_gib,
        metavar="G",
        help="hold the memory estimate against GPUs of G GiB each, in place of what this machine has",
    )
    parser.add_argument("--full", action="store_true", help="show every key of the recipe, defaults included")


def _run(known: argparse.Namespace, overrides: Sequence[str]) -> int:
    recipe = read_recipe(known.recipe, overrides)
    # After the recipe is known to be good: these imports take seconds.
    from ratoon.cli.plan_page import page_lines
    from ratoon.loop.dry_run import dry_run

    with _leaving_no_bytecode():
        found = dry_run(
            recipe,
            recipe_dir=folder_of_files(known.recipe),
            num_ranks=known.gpus or num_ranks(recipe.trainer),
            on_gpus=known.gpus is not None,
            gpu_memory_gib=known.gpu_memory_gib,
        )
    for line in page_lines(found, recipe_file=known.recipe, full=known.full):
        print(line)
    problems = found.problems()
    if problems:
        sys.stdout.flush()
        complain("plan", ". Also: ".join(problems))
    return 2 if problems else 0


def _num_gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_PROCESSES:,}, got {text!r}")
    return int(text)


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib <= _MOST_GIB:
        raise argparse.ArgumentTypeError(
            f"must be a number of GiB, above 0 and up to {_MOST_GIB:,}, such as 80, got {text!r}"
        )
    return gib


@contextmanager
def _leaving_no_bytecode() -> Iterator[None]:
    """Imports of the user's reward files inside, here and in worker processes, write no __pycache__."""
    name = "PYTHONDONTWRITEBYTECODE"
    before, before_here = os.environ.get(name), sys.dont_write_bytecode
    os.environ[name], sys.dont_write_bytecode = "1", True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before_here
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
