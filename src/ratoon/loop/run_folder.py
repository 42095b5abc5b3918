"""The folder of a run: who holds it, what recipe it follows, and whether it is new, resumable or complete."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ratoon.config.loading import changed_keys, dump_recipe, load_recipe
from ratoon.config.recipe import Recipe
from ratoon.loop.origin import ORIGIN_FILE, origin_text
from ratoon.loop.run_files import check_run_files
from ratoon.trainer.durable_files import replace_file
from ratoon.trainer.rollout_table import rollout_step
from ratoon.types.errors import UserError

RECIPE_FILE = "recipe.toml"

# What may differ between the command that began a run and the one that resumes it: its length,
# its evaluation, what it writes, and where it runs. Everything else would make it another run.
_MAY_CHANGE = (
    "run.name",
    "run.output_dir",
    "evaluation.",
    "logging.",
    "stop.",
    "trainer.num_steps",
    "trainer.checkpoint_every_steps",
    "trainer.keep_checkpoints",
    "trainer.device",
    "model.recompute",
    "model.compile",
    "planner.",
    "trainer.offload_optimizer",
    "trainer.num_processes",
    "trainer.sharding",
    "trainer.sequence_parallel",
    "trainer.rank_timeout_s",
    "rollout.timeout_s",
    "rollout.server.",
    *(f"rollout.vllm.{key}" for key in ("gpu_memory_utilization", "cache_gib", "enforce_eager", "sleep", "bucket_mib")),
    "rollout.vllm.max_probe_gap",
    "reward.timeout_s",
    "reward.num_workers",
    "reward.start_timeout_s",
    "reward.max_memory_gb",
)

_IN_PROCESS = frozenset({"auto", "transformers", "paged"})
"""Engines that draw the same from the same weights, rounding apart; `auto` follows the device, which may change."""

_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`output_dir/name`, held by this process until it is closed."""

    path: Path
    """Absolute: the user's functions may change the current folder."""

    named: Path
    """The same as the recipe names it, for messages."""

    lock: TextIO
    """Locked; the operating system frees it when the process ends, however it ends."""

    set_aside: Path | None = None
    """Where `fresh` has moved the run that was there, named as `named` is."""

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lock.close()

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
    def reference(self) -> Path:
        """The warm-started model, where a KL penalty needs it."""
        return self.path / "reference"

    @property
    def reference_fingerprint(self) -> Path:
        """Of the model that a KL penalty is measured against, where the recipe names it."""
        return self.path / "reference.sha256"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def rewards_log(self) -> Path:
        """What reward functions print."""
        return self.path / "rewards.log"

    def shown(self, path: Path) -> Path:
        """A path in this folder as the recipe names it."""
        return self.named / path.relative_to(self.path)

    def store_recipe(self, recipe: Recipe) -> None:
        """Writes the resolved recipe that the run goes on with."""
        _store(self.path / RECIPE_FILE, dump_recipe(recipe))

    def store_origin(self, recipe_dir: Path) -> None:
        """Writes where the recipe is now, so that other commands find the files it names."""
        _store(self.path / ORIGIN_FILE, origin_text(recipe_dir))

    def remove_rollouts_after(self, step: int) -> None:
        """Removes the tables of steps after `step`, which a run resumed from that step's checkpoint writes again.
        Other files, which are the user's own, stay."""
        for table in self.rollouts.glob("*.parquet"):
            number = rollout_step(table)
            if number is not None and number > step:
                table.unlink()


def open_run_folder(recipe: Recipe, *, fresh: bool) -> RunFolder:
    """The run's folder, made or found again, with the resolved recipe in it.

    `fresh` sets an existing folder aside under the next free name; nothing is deleted. Raises UserError
    where the folder cannot be written, holds what is none of a run's files under the name of one, or a run of another
    recipe, or where another process holds it.
    """
    named = expanded(recipe.run.output_dir) / recipe.run.name
    path = named.absolute()
    set_aside: Path | None = None
    try:
        if fresh and path.exists():
            _refuse_if_held(path, named)
            aside = path.rename(_next_free_name(path))
            set_aside = named.with_name(aside.name)
        path.mkdir(parents=True, exist_ok=True)
        check_run_files(path, named)
        folder = RunFolder(path, named, _lock(path, named), set_aside)
        try:
            if (path / RECIPE_FILE).exists():
                check_same_run(recipe, path, named)
            for file in (folder.metrics, folder.log):
                file.open("a").close()
            if not (path / RECIPE_FILE).exists():
                folder.store_recipe(recipe)
        except BaseException:
            folder.lock.close()
            raise
    except OSError as error:
        raise unwritable(named, error) from None
    return folder


def unwritable(named: Path, error: OSError) -> UserError:
    return UserError(
        f"run folder {named} cannot be written ({error.strerror}: {error.filename or named}); "
        "mend that, or set run.output_dir to another folder"
    )


def expanded(output_dir: str) -> Path:
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in output_dir.split("/")):
        raise UserError(
            f"run.output_dir = {output_dir[:80]!r}... has a part of more than {_MAX_NAME_BYTES} bytes, which is more "
            "than a folder's name may have; shorten it"
        )
    try:
        return Path(output_dir).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"run.output_dir = {output_dir!r} begins with the home folder of a user that cannot be found ({error}); "
            "write the folder out, or put ./ before a folder whose name begins with ~"
        ) from None


def _lock(path: Path, named: Path) -> TextIO:
    # Append mode: opening must not empty the note of a process that holds the lock.
    lock = (path / "lock").open("a+", errors="replace")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise UserError(
            f"run folder {named} is held by another process (pid {holder}); wait for it, stop it, "
            "or give this run another name with --run.name=NAME"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    # A process that the user's functions fork shares the lock, and would hold it after this one has died.
    os.register_at_fork(after_in_child=lock.close)
    return lock


def _store(file: Path, text: str) -> None:
    """Leaves a file alone that holds `text` already."""
    if not file.exists() or file.read_bytes() != text.encode("utf-8"):

        def write(partial: Path) -> None:
            partial.write_text(text, encoding="utf-8")

        replace_file(file, write)


def _refuse_if_held(path: Path, named: Path) -> None:
    if not path.is_dir() or (path / "lock").is_file():  # what else is called so, nobody holds
        _lock(path, named).close()


def _next_free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


def check_same_run(recipe: Recipe, path: Path, named: Path) -> None:
    try:
        stored = load_recipe(path / RECIPE_FILE)
    except UserError as error:
        raise UserError(
            f"run folder {named} holds a run whose recipe this version cannot read ({error}). "
            "Give this run another name with --run.name=NAME, or start anew with --fresh (the old run is set aside)"
        ) from None
    may_change = _MAY_CHANGE
    if {stored.rollout.engine, recipe.rollout.engine} <= _IN_PROCESS:
        may_change = (*may_change, "rollout.engine")
    changed = [key for key in changed_keys(stored, recipe) if not key.startswith(may_change)]
    if changed:
        raise UserError(
            f"run folder {named} holds a run of another recipe; changed: {', '.join(changed)}. "
            "Give this run another name with --run.name=NAME, or start anew with --fresh (the old run is set aside)"
        )
