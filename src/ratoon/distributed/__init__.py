"""Sums, broadcasts and sharded weights between the processes that train one model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.distributed.agreement import (
        OtherRankError,
        on_each,
        on_each_awaited,
        on_each_kept,
        on_main,
        on_main_awaited,
    )
    from ratoon.distributed.data_parallel import CollectiveError, DataParallel
    from ratoon.distributed.launch import from_environment, single_process
    from ratoon.distributed.sharded import (
        clip_gradients,
        full_weights,
        idle_layout,
        is_sharded,
        reshard,
        run_in_root,
        shard_mesh,
        shard_model,
    )
    from ratoon.distributed.sharded_checkpoint import load_sharded, save_sharded
    from ratoon.distributed.ulysses import SequenceGroup, ranks_mesh, sequence_group

_HOMES = {
    "CollectiveError": "data_parallel",
    "DataParallel": "data_parallel",
    "OtherRankError": "agreement",
    "SequenceGroup": "ulysses",
    "clip_gradients": "sharded",
    "from_environment": "launch",
    "full_weights": "sharded",
    "idle_layout": "sharded",
    "is_sharded": "sharded",
    "load_sharded": "sharded_checkpoint",
    "on_each": "agreement",
    "on_each_awaited": "agreement",
    "on_each_kept": "agreement",
    "on_main": "agreement",
    "on_main_awaited": "agreement",
    "ranks_mesh": "ulysses",
    "reshard": "sharded",
    "run_in_root": "sharded",
    "save_sharded": "sharded_checkpoint",
    "sequence_group": "ulysses",
    "shard_mesh": "sharded",
    "shard_model": "sharded",
    "single_process": "launch",
}

__all__ = [
    "CollectiveError",
    "DataParallel",
    "OtherRankError",
    "SequenceGroup",
    "clip_gradients",
    "from_environment",
    "full_weights",
    "idle_layout",
    "is_sharded",
    "load_sharded",
    "on_each",
    "on_each_awaited",
    "on_each_kept",
    "on_main",
    "on_main_awaited",
    "ranks_mesh",
    "reshard",
    "run_in_root",
    "save_sharded",
    "sequence_group",
    "shard_mesh",
    "shard_model",
    "single_process",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
