"""Runs in processes of their own, which a test stops or kills."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.loop.tiny_run import TinyRun

_SPAWN_S = 90.0
_TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def start(context: ForkServerContext, tiny: TinyRun, *arguments: str, die_at_touch: int | None = None) -> BaseProcess:
    """`ratoon train RECIPE ARGUMENTS`. What it prints goes to the file `output`.

    die_at_touch: it kills itself as it is about to open, rename, make or remove something in its run folder for the
    so-many-th time, counted from 0. A process that is not killed leaves its measures for `cost`.
    """
    command = ["train", str(tiny.recipe), *arguments]
    process = context.Process(target=_ratoon, args=(command, tiny.folder, tiny.run_dir, die_at_touch), daemon=True)
    process.start()
    return process


def wait_for(is_reached: Callable[[], bool], process: BaseProcess) -> None:
    """Returns when the moment is reached, or the process has ended."""
    deadline = time.monotonic() + _SPAWN_S
    while not is_reached() and process.is_alive():
        assert time.monotonic() < deadline, "the run did not come to the moment at which it is to die"
        time.sleep(0.0005)


def kill(process: BaseProcess) -> bool:
    """SIGKILL. Returns whether it was still running."""
    process.kill()
    process.join(timeout=30)
    return process.exitcode == -signal.SIGKILL


def cpu_seconds(process: BaseProcess) -> float:
    """Seconds of the processor that it has used: they tell how far it is, however busy the machine is."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(tiny: TinyRun) -> tuple[float, list[tuple[str, str]]]:
    """Of the last process that ended by itself: its processor seconds, and event and path of each touch."""
    measured = json.loads((tiny.folder / "cost.json").read_text())
    return measured["cpu_s"], [(event, path) for event, path in measured["touches"]]


def _ratoon(command: Sequence[str], folder: Path, run_dir: Path, die_at_touch: int | None) -> None:
    descriptor = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from ratoon.cli.main import main

    touches: list[tuple[str, str]] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in _TOUCHES and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if path.startswith(str(run_dir)):
                if len(touches) == die_at_touch:
                    os.kill(os.getpid(), signal.SIGKILL)
                touches.append((event, path))

    sys.addaudithook(watch)
    status = main(list(command))
    (folder / "cost.json").write_text(json.dumps({"cpu_s": time.process_time(), "touches": touches}))
    sys.stdout.flush()
    os._exit(status)
