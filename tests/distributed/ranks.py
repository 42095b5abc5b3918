"""Gloo ranks in processes of their own."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ratoon.distributed import DataParallel, from_environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(environment: dict[str, str], work: Callable[[DataParallel, Path], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    result_file = folder / f"rank{environment['RANK']}.pt"
    try:
        data_parallel = from_environment("cpu", timeout_s=60, environment=environment)
        torch.save(work(data_parallel, folder), result_file)
        data_parallel.close()
    except BaseException:
        torch.save(traceback.format_exc(), result_file)


def run_on_ranks(world_size: int, work: Callable[[DataParallel, Path], Any], folder: Path) -> list[Any]:
    """What `work` returned on each rank. A rank's exception fails the test with that rank's traceback.

    work: a function of a module's own, for the processes to find. folder: the same for all ranks.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of by each rank. The server itself never computes, so that no thread is lost in a fork.
    context.set_forkserver_preload([work.__module__])
    launch = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    folder.mkdir(exist_ok=True)
    ranks = [
        context.Process(target=_rank_main, args=(launch | {"RANK": str(rank)}, work, folder))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
        process.kill()
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return results
