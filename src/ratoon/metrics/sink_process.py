"""`python -m ratoon.metrics.sink_process TASK`: copies metrics.jsonl to one sink until the run ends."""

import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratoon.metrics.rows import MetricsRow, parse_metrics
from ratoon.metrics.sink_task import SinkTask, write_whole
from ratoon.metrics.sink_writers import SinkWriter, numbers_of, open_writer
from ratoon.metrics.sinks import FAILURE_PREFIX

_POLL_S = 0.5


class MetricsFollower:
    """Reads a growing metrics.jsonl from its beginning, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._tail = b""

    def new_rows(self) -> list[MetricsRow]:
        """Rows written since the call before."""
        *lines, self._tail = (self._tail + self._file.read()).split(b"\n")
        return parse_metrics(self._path, [line.decode("utf-8", errors="replace") for line in lines])


class RunEnd:
    """Hears of the end of the training process, and from then on limits the seconds this one has."""

    def __init__(self, task: SinkTask) -> None:
        self.is_complete = False
        """Whether the run said that it ended as it should; known once `wait` returns true."""
        self._task = task
        self._has_come = threading.Event()
        threading.Thread(target=self._listen, name="end of the run", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the end has come, after at most `seconds`."""
        return self._has_come.wait(seconds)

    def _listen(self) -> None:
        # Forked workers may hold the pipe open when the run has died: its process id tells too.
        heard = False
        while not heard and os.getppid() == self._task.parent_pid:
            heard = bool(select.select([sys.stdin], [], [], _POLL_S)[0])
        self.is_complete = heard and sys.stdin.readline().strip() == "complete"
        self._has_come.set()
        time.sleep(self._task.timeout_s)
        _say_failure(f"it did not finish within logging.timeout_s = {self._task.timeout_s:g} seconds of the run's end")
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the tool's own processes too


def copy_rows(task: SinkTask, end: RunEnd) -> None:
    """Sends every row that the sink lacks, until the run ends."""
    sent: dict[str, int] = {}
    writer = open_writer(task)
    if not writer.starts_empty:
        sent = _read_progress(task)
    already = dict(sent)
    follower = MetricsFollower(Path(task.metrics_path))
    has_ended = False
    while not has_ended:
        has_ended = end.wait(_POLL_S)  # before reading, so that the last rows are read after the end
        for row in follower.new_rows():
            if row.step > already.get(row.phase, -1):
                _write(writer, row)
                sent[row.phase] = row.step
        writer.flush()
        if not writer.starts_empty:
            _write_progress(task, sent)
    writer.close(is_complete=end.is_complete)


def _write(writer: SinkWriter, row: MetricsRow) -> None:
    numbers = numbers_of(row)
    if numbers:
        writer.write(row, numbers)


def _progress_path(task: SinkTask) -> Path:
    return task.folder / f"{task.sink}.json"


def _read_progress(task: SinkTask) -> dict[str, int]:
    """By phase, the last step that the sink has; steps taken again by a resumed run are those it has already."""
    try:
        stored = json.loads(_progress_path(task).read_text(encoding="utf-8"))
        if stored["destination"] == task.destination:
            return {str(phase): int(step) for phase, step in stored["sent"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # a first start, or a note that someone has spoilt: rows that come twice do less harm than none
    return {}


def _write_progress(task: SinkTask, sent: dict[str, int]) -> None:
    text = json.dumps({"destination": task.destination, "sent": sent})
    path = _progress_path(task)
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_whole(path, text)


@contextmanager
def _turn(task: SinkTask) -> Iterator[None]:
    """Waits for the process that a killed run may have left, which still sends its last rows."""
    with (task.folder / f"{task.sink}.lock").open("a") as lock:
        deadline = time.monotonic() + task.timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("the sink of an earlier process of this run does not end") from None
                time.sleep(_POLL_S)
        yield


def _say_failure(reason: str) -> None:
    print(f"\n{FAILURE_PREFIX}{reason}", file=sys.stderr, flush=True)


def main(text: str) -> int:
    """Runs the task that `text` describes. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the run hears them, finishes its step, and ends its sinks
    task = SinkTask.from_json(text)
    end = RunEnd(task)
    try:
        with _turn(task):
            copy_rows(task, end)
    except BaseException as error:  # whatever a tool raises, SystemExit included, is said in one line
        import traceback

        traceback.print_exc()
        _say_failure(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    if status:
        os._exit(status)  # what failed may hang in its handlers too
    sys.exit(status)
