"""What a run's folder holds, looked at without touching it."""

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratoon.config.recipe import Recipe
from ratoon.loop.run_files import check_run_files
from ratoon.loop.run_folder import RECIPE_FILE, check_same_run, expanded, unwritable
from ratoon.metrics import read_metrics
from ratoon.trainer.checkpoint import checkpoint_step, find_damage
from ratoon.types.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What `ratoon train` would do with the run folder of a recipe."""

    named: Path
    """The folder as the recipe names it."""

    status: Literal["new", "resumable", "complete", "unusable"]
    num_steps_done: int

    checkpoint_bytes: int
    """On disk already."""

    free_bytes: int
    """Of the disk that the folder is on, or would be."""

    problem: str | None = None
    """Why `ratoon train` would refuse the folder."""


def peek_run_folder(recipe: Recipe, *, has_heldout: bool) -> RunState:
    """Reads names, sizes and the metrics; of checkpoints not every byte, as resuming does. Writes nothing."""
    named = expanded(recipe.run.output_dir) / recipe.run.name
    path = named.absolute()
    try:
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:  # too long, or behind a folder that may not be read
        raise unwritable(named, error) from None
    checkpoints = path / "checkpoints"
    problem = _problem(recipe, path, named, parent)
    step = None if problem is not None else _newest_whole_step(checkpoints)
    if problem is not None:
        status = "unusable"
    elif step is None:
        status = "new"
    else:
        is_done = step >= recipe.trainer.num_steps and (not has_heldout or _is_evaluated(path, step))
        status = "complete" if is_done else "resumable"
    return RunState(
        named=named,
        status=status,
        num_steps_done=step or 0,
        checkpoint_bytes=sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file()),
        free_bytes=shutil.disk_usage(parent).free,
        problem=problem,
    )


def _problem(recipe: Recipe, path: Path, named: Path, parent: Path) -> str | None:
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "not writable" if parent.is_dir() else "no folder"
        return f"run folder {named} cannot be written ({parent} is {why}); mend that, or set run.output_dir"
    try:
        check_run_files(path, named)
    except UserError as error:
        return str(error)
    if _is_held(path / "lock"):
        return (
            f"run folder {named} is held by another process; wait for it, stop it, or give this run another name "
            "with --run.name=NAME"
        )
    if (path / RECIPE_FILE).exists():
        try:
            check_same_run(recipe, path, named)
        except UserError as error:
            return str(error)
    return None


def _is_held(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # there is none
    return False


def _newest_whole_step(checkpoints: Path) -> int | None:
    if not checkpoints.is_dir():
        return None
    steps = {path: step for path in checkpoints.iterdir() if (step := checkpoint_step(path)) is not None}
    return max((step for path, step in steps.items() if find_damage(path, read_bytes=False) is None), default=None)


def _is_evaluated(path: Path, step: int) -> bool:
    metrics = path / "metrics.jsonl"
    return metrics.is_file() and any(row.phase == "evaluate" and row.step == step for row in read_metrics(metrics))
