"""What the processes of one run have in common, and what rank 0 alone may touch."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from ratoon.config.recipe import Recipe
from ratoon.distributed import DataParallel, OtherRankError, from_environment, on_main
from ratoon.loop.inputs import resolve_device
from ratoon.loop.run_folder import RunFolder, open_run_folder
from ratoon.types.errors import UserError
from ratoon.view import RunView


@contextmanager
def joined(recipe: Recipe) -> Iterator[DataParallel]:
    """This process's place among the ranks that a launcher has started, until the run ends; alone without one.

    Raises UserError where the recipe's device is not here, which one rank of each host tells of.
    """
    try:
        device = resolve_device(recipe.trainer.device)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise OtherRankError(0, str(error), is_users=True) from error
    # Transformers sets it, and says so, when generation begins; NCCL reads it as the ranks meet. No CUDA graph is used.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    ranks = from_environment("cuda" if device.type == "cuda" else "cpu", timeout_s=recipe.trainer.rank_timeout_s)
    yield ranks
    ranks.close()  # not after a failure: the other ranks may never come


def check_waits(recipe: Recipe, num_ranks: int) -> None:
    """Raises UserError where one rank may be busy, within a limit of the recipe's, for longer than the others wait."""
    if num_ranks == 1:
        return
    waits = {"reward.timeout_s": recipe.reward.timeout_s, "reward.start_timeout_s": recipe.reward.start_timeout_s}
    waits["rollout.timeout_s"] = recipe.rollout.timeout_s
    if recipe.rollout.server.command:
        waits["rollout.server.ready_timeout_s"] = recipe.rollout.server.ready_timeout_s
    longest = recipe.trainer.rank_timeout_s
    for key, seconds in waits.items():
        if seconds >= longest:
            raise UserError(
                f"{key} = {seconds:g} lets one of the {num_ranks} processes take {seconds:g} s, and the others end the "
                f"run when they have waited for trainer.rank_timeout_s = {longest:g}; raise that above it, or lower "
                f"{key}"
            )


def cuts_model(recipe: Recipe, num_ranks: int) -> bool:
    """Whether each rank holds a part of the policy only. One rank has nothing to share it out over."""
    if num_ranks == 1 or recipe.trainer.sharding == "none":
        return False
    is_whole_by_default = recipe.model.lora is not None or recipe.trainer.optimizer_states == "8bit"
    return recipe.trainer.sharding == "full" or not is_whole_by_default


def open_shared_run_folder(recipe: Recipe, ranks: DataParallel, *, fresh: bool) -> RunFolder:
    """Rank 0 opens and holds the folder; the others know its paths. All see the same disk."""
    held: list[RunFolder] = []

    def work() -> tuple[Path, Path, Path | None]:
        folder = open_run_folder(recipe, fresh=fresh)
        held.append(folder)
        return folder.path, folder.named, folder.set_aside

    path, named, set_aside = on_main(ranks, "run folder", work)
    return held[0] if held else RunFolder(path, named, Path(os.devnull).open(), set_aside)


def run_view(recipe: Recipe, ranks: DataParallel, log: Callable[[str], None]) -> RunView:
    """Rank 0's shows the run; those of the others show nothing."""
    if ranks.is_main:
        return RunView(recipe.run.name, log=log)
    return RunView(recipe.run.name, log=lambda _: None, console=Console(quiet=True), live=False)
