"""Checkpoints that several ranks write together: rank 0 all but its share of what is cut over them."""

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ratoon.distributed import DataParallel, is_sharded, load_sharded, on_each, on_main, save_sharded
from ratoon.trainer.checkpoint import (
    STATE_FOLDER,
    Checkpoint,
    begin_checkpoint,
    checkpoint_name,
    complete_checkpoint,
    naming_full_disk,
    remove_old_checkpoints,
    save_checkpoint,
    write_state,
)
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.trainer.state_tree import state_bytes

_SHARDS = "shards"
"""In the state's folder, what the ranks of a sharded run wrote: master weights and moments."""

_OPTIMIZER = "optimizer"
"""In the state, the optimizer's; in a sharded run's it is in the shards instead."""


def save_shared_checkpoint(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: MasterOptimizer,
    ranks: DataParallel,
    model_writer: Callable[[Path], None],
    model_bytes: int,
    state: Mapping[str, Any],
    position: Mapping[str, Any],
    keep_last: int = 2,
    keep_steps: Collection[int] = (),
) -> Path:
    """`save_checkpoint` on all ranks, which call it together; the optimizer's state is added to `state`.

    model_writer: called on rank 0, with a model that it holds whole. Where `model` is sharded, every rank writes its
    parts of masters and moments; the checkpoint has its name only once all of them are on disk. A run of any number of
    ranks reads it (`restore_optimizer`).
    """

    def save_whole() -> Path:
        return save_checkpoint(
            folder, step,
            model_writer=model_writer,
            model_bytes=model_bytes,
            state={_OPTIMIZER: optimizer.state_dict(), **state},
            position=position,
            keep_last=keep_last,
            keep_steps=keep_steps,
        )  # fmt: skip

    if not is_sharded(model):
        return on_main(ranks, "checkpoint", save_whole)
    num_bytes = model_bytes + state_bytes(state) + sharded_state_bytes(optimizer)
    partial = on_main(ranks, "beginning of a checkpoint", lambda: begin_checkpoint(folder, step, num_bytes=num_bytes))
    final = folder / checkpoint_name(step)
    if partial is None:
        return final

    def write_shards() -> None:
        with naming_full_disk(partial, num_bytes):
            shards = partial / STATE_FOLDER / _SHARDS
            group = ranks.control_group
            save_sharded(shards, model, optimizer.adamw, masters=optimizer.master_of, process_group=group)

    def complete() -> None:
        with naming_full_disk(partial, num_bytes):
            model_writer(partial)
            write_state(partial / STATE_FOLDER, dict(state), position)
            complete_checkpoint(partial, step)
        remove_old_checkpoints(folder, newest=final, keep_last=keep_last, keep_steps=keep_steps)

    try:
        on_each(ranks, "shards of a checkpoint", write_shards)
        on_main(ranks, "end of a checkpoint", complete)
    finally:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def restore_optimizer(
    checkpoint: Checkpoint, *, model: nn.Module, optimizer: MasterOptimizer, ranks: DataParallel
) -> None:
    """The optimizer as it was, whether one process or any number of ranks wrote the checkpoint. All ranks call it.

    model: with the checkpoint's weights. Its masters, of more digits, are part of the optimizer's state.
    """
    if _OPTIMIZER in checkpoint.state:
        optimizer.load_state_dict(checkpoint.state[_OPTIMIZER])
        return
    shards = checkpoint.path / STATE_FOLDER / _SHARDS
    group = ranks.control_group
    load_sharded(shards, model, optimizer.adamw, masters=optimizer.master_of, process_group=group)
    optimizer.take_masters()


def sharded_state_bytes(optimizer: MasterOptimizer) -> int:
    """What all ranks together write: two moments of each weight, and the weights in the masters' dtype."""
    return sum(3 * master.numel() * master.element_size() for master in optimizer.masters)
