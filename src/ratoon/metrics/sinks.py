"""Copies of metrics.jsonl in TensorBoard, wandb and trackio, each made by a process of its own.

A sink's process reads the file as it grows. So the run neither waits for a sink nor fails with it: a sink that hangs is
ended, one that fails is warned of once, and a sink that begins late or again has the earlier rows in the file.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Literal

from ratoon.metrics.config import LoggingConfig, SinkName
from ratoon.metrics.sink_task import SinkTask, run_id_of
from ratoon.types import UserError
from ratoon.types.extras import install_command

Ending = Literal["complete", "failed"]

FAILURE_PREFIX = "failed: "
"""Begins the last line of the log of a sink that failed."""

_REAP_S = 5.0
"""Beyond its own time limit, for a sink's process to end."""


def check_sinks(config: LoggingConfig) -> None:
    """Raises UserError for a sink whose package is not installed. Imports none of them."""
    for sink in config.sinks:
        spec = find_spec(sink)
        # A folder of that name in the current one, such as wandb makes, is found too, and is no package.
        if spec is None or spec.origin is None:
            raise UserError(
                f'logging.sinks names "{sink}", which is not installed here; '
                f"install it ({install_command(sink)}), or take it out of logging.sinks"
            )


@dataclass(slots=True)
class _Child:
    task: SinkTask
    process: subprocess.Popen[bytes]


class Sinks:
    """The sinks of one run. Nothing here raises for a sink that fails: `warn` is told, once for each."""

    def __init__(
        self, config: LoggingConfig, *, run_dir: Path, run_name: str, warn: Callable[[str], object], metrics: Path
    ) -> None:
        """metrics: the metrics.jsonl that is copied. No process starts before the first `follow`."""
        self._config = config
        self._run_dir = run_dir.absolute()
        self._metrics = metrics.absolute()
        self._run_name = run_name
        self._warn = warn
        self._children: list[_Child] = []
        self.is_started = False

    def follow(self) -> None:
        """Call it after each row: starts the sinks' processes at the first, and warns of those that have ended."""
        if not self.is_started:
            self.is_started = True
            for sink in self._config.sinks:
                self._start(sink)
        for child in list(self._children):
            if child.process.poll() is not None:
                self._report(child)

    def close(self, ending: Ending, *, wait: bool = True) -> None:
        """Tells the sinks that no more rows come, and waits for them, at most `logging.timeout_s`.

        Without `wait`, they send what they still hold, within the same limit, after this process has gone on.
        """
        for child in self._children:
            assert child.process.stdin is not None, "a sink's process has a pipe to hear of the end by"
            with suppress(OSError):  # it has ended already
                child.process.stdin.write(ending.encode() + b"\n")
                child.process.stdin.close()
        deadline = time.monotonic() + self._config.timeout_s + _REAP_S
        for child in list(self._children) if wait else ():
            try:
                child.process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                _kill(child.process)
            self._report(child)
        self._children.clear()

    def _start(self, sink: SinkName) -> None:
        try:
            task = self._task(sink)
            source = str(Path(__file__).parents[2])
            paths = [source, os.environ.get("PYTHONPATH", "")]
            with task.log_path.open("wb") as log:
                process = subprocess.Popen(
                    # -P: modules in the current folder must not take the place of the sink's own.
                    [sys.executable, "-P", "-m", "ratoon.metrics.sink_process", task.to_json()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    bufsize=0,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
                    start_new_session=True,  # Ctrl-C ends the run, which then ends its sinks
                )
        except OSError as error:
            self._warn(f"{sink} could not be started ({error}); metrics.jsonl goes on without it")
            return
        self._children.append(_Child(task, process))

    def _task(self, sink: SinkName) -> SinkTask:
        config = self._config
        in_run = self._run_dir / "tensorboard"
        shared = config.tensorboard_dir
        return SinkTask(
            sink=sink,
            run_dir=str(self._run_dir),
            metrics_path=str(self._metrics),
            run_name=self._run_name,
            run_id=run_id_of(self._run_dir, self._run_name),
            project=config.project,
            entity=config.entity,
            group=config.group,
            tensorboard_dir=str(in_run if shared is None else Path(shared).absolute() / self._run_name),
            timeout_s=config.timeout_s,
            parent_pid=os.getpid(),
        )

    def _report(self, child: _Child) -> None:
        """Forgets a child that has ended, and says so if it failed."""
        self._children.remove(child)
        if child.process.returncode != 0:
            sink, reason = child.task.sink, _failure(child)
            self._warn(
                f"{sink} failed ({reason}; all it said stands in {child.task.log_path}): metrics.jsonl is whole, and "
                f"the same command again sends {sink} the rows it lacks"
            )


def _failure(child: _Child) -> str:
    text = ""
    with suppress(OSError):
        text = child.task.log_path.read_text(encoding="utf-8", errors="replace")
    reasons = [line.removeprefix(FAILURE_PREFIX) for line in text.splitlines() if line.startswith(FAILURE_PREFIX)]
    return reasons[-1] if reasons else f"its process ended with status {child.process.returncode}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)
    process.wait()
