"""How a process learns its place among the ranks."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ratoon.distributed.data_parallel import CollectiveError, DataParallel
from ratoon.types import UserError

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def single_process() -> DataParallel:
    """The only rank of a run; nothing is initialised."""
    return DataParallel(rank=0, world_size=1)


def from_environment(
    device_type: Literal["cpu", "cuda"] = "cpu",
    *,
    timeout_s: float = 600.0,
    environment: Mapping[str, str] = os.environ,
) -> DataParallel:
    """The place that torchrun gave this process, its process groups initialised; the only rank without torchrun.

    device_type: where parameters live: gloo sums them on the CPU, NCCL on CUDA (this process then takes the GPU of its
    local rank). timeout_s: limit of the start and of every collective.

    Raises UserError when some launch variables are set and others missing or wrong, CollectiveError when the other
    ranks do not come in time.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return single_process()
    rank, world_size = _place(environment)
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU: this host shows {torch.cuda.device_count()}; "
                "start as many processes a host as it has GPUs (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(local_rank)
    if world_size == 1:
        return DataParallel(rank=0, world_size=1, local_rank=local_rank, timeout_s=timeout_s)
    limit = timedelta(seconds=timeout_s)
    where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    try:
        with _ctrl_c_ends_the_process():
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                init_method=f"tcp://{where}" if environment is not os.environ else "env://",
                rank=rank,
                world_size=world_size,
                timeout=limit,
            )
            control_group = dist.new_group(backend="gloo", timeout=limit) if device_type == "cuda" else None
        assert not isinstance(control_group, int), "every rank is a member of the control group"
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {rank} of {world_size} could not join the others at {where} within {timeout_s:g} s: {error}; "
            "check that every rank was started, and that MASTER_ADDR and MASTER_PORT can be reached from each host"
        ) from error
    return DataParallel(
        rank=rank, world_size=world_size, local_rank=local_rank, timeout_s=timeout_s, control_group=control_group
    )


@contextmanager
def _ctrl_c_ends_the_process() -> Iterator[None]:
    """Where Python would hear of it once torch returns, which waits for ranks that may have ended by the same Ctrl-C.
    Nothing has begun yet that this process would have to end in order."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    missing = [name for name in _LAUNCH_VARIABLES if name not in environment]
    if missing:
        raise UserError(
            f"environment variables {', '.join(missing)} are missing beside "
            f"{', '.join(name for name in _LAUNCH_VARIABLES if name in environment)}; start the ranks with torchrun"
        )
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, world_size = -1, 0
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK and WORLD_SIZE must be whole numbers with 0 <= RANK < WORLD_SIZE, got RANK={environment['RANK']!r} "
            f"and WORLD_SIZE={environment['WORLD_SIZE']!r}; start the ranks with torchrun"
        )
    return rank, world_size
