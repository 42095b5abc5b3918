"""Runs of several ranks in processes of their own, as a launcher starts them."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.loop.tiny_run import TinyRun

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """One run's processes."""

    processes: tuple[BaseProcess, ...]
    outputs: tuple[Path, ...]

    def join(self) -> tuple[int | None, ...]:
        """Each one's exit status once all have ended."""
        for process in self.processes:
            process.join(timeout=_LIMIT_S)
        is_hanging = [process.is_alive() for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        assert not any(is_hanging), f"ranks that hang: {is_hanging}; they said {self.said()}"
        return tuple(process.exitcode for process in self.processes)

    def said(self) -> list[str]:
        return [output.read_text() if output.exists() else "" for output in self.outputs]

    def complaints(self) -> list[str]:
        """Lines of all ranks that name what ended the run."""
        return [line for text in self.said() for line in text.splitlines() if line.startswith("ratoon train: ")]


def start_ranks(
    context: ForkServerContext,
    tiny: TinyRun,
    *arguments: str,
    count: int = 2,
    disturb: Callable[[int], None] | None = None,
) -> Ranks:
    """disturb: called in each rank, with its number, before the command; a function of a module's own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outputs = tuple(tiny.folder / f"output-{rank}" for rank in range(count))
    processes: list[BaseProcess] = []
    for rank, output in enumerate(outputs):
        output.unlink(missing_ok=True)
        place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = ["train", str(tiny.recipe), *arguments]
        process = context.Process(target=_rank, args=(command, place, output, disturb), daemon=True)
        process.start()
        processes.append(process)
    return Ranks(tuple(processes), outputs)


def _rank(command: Sequence[str], place: dict[str, str], output: Path, disturb: Callable[[int], None] | None) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(place)
    import torch

    from ratoon.cli.main import main

    torch.set_num_threads(1)
    if disturb is not None:
        disturb(int(place["RANK"]))
    status = main(list(command))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
