"""The folder of a run: who holds it, what recipe it follows, and whether it is new, resumable or complete."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ratoon.config.loading import changed_keys, dump_recipe, load_recipe
from ratoon.config.recipe import Recipe
from ratoon.types.errors import UserError

RECIPE_FILE = "recipe.toml"

# What may differ between the command that began a run and the one that resumes it: its length,
# its evaluation, what it writes, and where it runs. Everything else would make it another run.
_MAY_CHANGE = (
    "run.output_dir",
    "evaluation.",
    "trainer.num_steps",
    "trainer.checkpoint_every_steps",
    "trainer.keep_checkpoints",
    "trainer.device",
    "rollout.timeout_s",
    "reward.timeout_s",
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`output_dir/name`, held by this process until it ends."""

    path: Path
    is_new: bool
    lock: TextIO
    """Locked; the operating system frees it when the process ends, however it ends."""

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "run.log"


def open_run_folder(recipe: Recipe, *, fresh: bool) -> RunFolder:
    """The run's folder, made or found again, with the resolved recipe in it.

    `fresh` sets an existing folder aside under the next free name; nothing is deleted. Raises UserError
    where the folder cannot be written, another process holds it, or it holds a run of another recipe.
    """
    path = Path(recipe.run.output_dir) / recipe.run.name
    try:
        if fresh and path.exists():
            _refuse_if_held(path)
            path.rename(_next_free_name(path))
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    except OSError as error:
        raise UserError(
            f"run folder {path} cannot be written ({error.strerror}); set run.output_dir to a folder that can"
        ) from None
    stored = path / RECIPE_FILE
    is_new = not stored.exists()
    if not is_new:
        _check_same_run(load_recipe(stored), recipe, path)
    partial = path / (RECIPE_FILE + ".partial")
    partial.write_text(dump_recipe(recipe))
    os.replace(partial, stored)
    return RunFolder(path, is_new, lock)


def _lock(path: Path) -> TextIO:
    # Append mode: opening must not empty the note of a process that holds the lock.
    lock = (path / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise UserError(
            f"run folder {path} is held by another process (pid {holder}); wait for it, stop it, "
            "or give this run another name with --run.name=NAME"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _refuse_if_held(path: Path) -> None:
    _lock(path).close()


def _next_free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def _check_same_run(stored: Recipe, recipe: Recipe, path: Path) -> None:
    changed = [key for key in changed_keys(stored, recipe) if not key.startswith(_MAY_CHANGE)]
    if changed:
        raise UserError(
            f"run folder {path} holds a run of another recipe; changed: {', '.join(changed)}. "
            "Give this run another name with --run.name=NAME, or start anew with --fresh (the old run is set aside)"
        )
