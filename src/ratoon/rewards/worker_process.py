"""The run's end of one reward worker: its process, its pipes, and what it has been asked."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

import psutil

from ratoon.rewards.messages import WHERE_SIGNAL, WorkerCall, to_frame
from ratoon.rewards.output_log import OutputLog

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ratoon.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)
_TAIL_BYTES = 8192
_READ_BYTES = 1 << 16
_MAX_REPLY_BYTES = 1 << 26
_FRAME = re.compile(rb'File "([^"\n]+)", line (\d+)')


class WorkerProcess:
    """A fresh interpreter in a session of its own. All pipes are its own, and their ends here never block."""

    def __init__(self, orders: bytes, output: OutputLog) -> None:
        """Starts it, to follow `orders`, a frame that holds Orders. output: gets what it prints."""
        request_read, self.request_fd = os.pipe()
        self.reply_fd, reply_write = os.pipe()
        self.output_fd, output_write = os.pipe()
        lifeline_read, self._lifeline_fd = os.pipe()
        theirs = (request_read, reply_write, lifeline_read)
        # Reproducible sets and dicts of strings, and no threads that nobody asked for, unless the user says so.
        defaults = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), *map(str, theirs)],
                stdin=subprocess.DEVNULL, stdout=output_write, stderr=output_write,
                pass_fds=theirs, start_new_session=True, env={**defaults, **os.environ},
            )  # fmt: skip
        except BaseException:
            for fd in self.fds:
                os.close(fd)
            raise
        finally:
            for fd in (*theirs, output_write):
                os.close(fd)
        for fd in self.fds[:-1]:
            os.set_blocking(fd, False)
        self.started_at = time.monotonic()
        self.is_ready = False
        self.calls: deque[WorkerCall] = deque()
        """Asked and not yet answered, in order."""
        self.is_concurrent = False
        self.busy_since = self.started_at
        """When the first of `calls` began, or all of them if they are concurrent."""
        self.was_asked_where = False
        self.has_hung_up = False
        """It closed its end of the replies: it has died, or a function closed it."""
        self._is_garbled = False
        self._output = output
        self._outgoing = bytearray(orders)
        self._incoming = bytearray()
        self._tail = bytearray()

    @property
    def fds(self) -> tuple[int, int, int, int]:
        """Requests, replies, output and lifeline."""
        return self.request_fd, self.reply_fd, self.output_fd, self._lifeline_fd

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.calls and not self._outgoing and not self.has_hung_up

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def ask(self, message: Any, calls: tuple[WorkerCall, ...] = (), *, is_concurrent: bool = False) -> None:
        self._outgoing += to_frame(message)
        self.calls.extend(calls)
        self.is_concurrent = is_concurrent
        self.busy_since = time.monotonic()
        self.was_asked_where = False
        self.send()

    def send(self) -> None:
        """As much of what is asked as the pipe takes."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self.request_fd, memoryview(self._outgoing)[:_READ_BYTES])]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self.has_hung_up = True
            self._outgoing.clear()

    def replies(self) -> list[Any]:
        """What it has said since the last time. What is no reply counts as hanging up."""
        data = self._read(self.reply_fd)
        if data is None:
            self.has_hung_up = True
        *lines, self._incoming = (self._incoming + (data or b"")).split(b"\n")
        found: list[Any] = []
        for line in lines:
            if self._is_garbled:
                break
            try:
                found.append(json.loads(line))
            except ValueError:
                self.refuse()
        if len(self._incoming) > _MAX_REPLY_BYTES:
            self.refuse()
        return found

    def refuse(self) -> None:
        """A function wrote into the pipe of replies: what comes from now on means nothing."""
        self.has_hung_up = self._is_garbled = True
        self._incoming.clear()

    def read_output(self) -> bool:
        """Takes in what was printed. Returns False once nobody can print any more."""
        data = self._read(self.output_fd, at_most=1 << 20)
        if data is None:
            return False
        self._output.add(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return True

    def _read(self, fd: int, at_most: int = 1 << 24) -> bytes | None:
        """What is there to read, None at the end."""
        parts = bytearray()
        with suppress(BlockingIOError):
            while len(parts) < at_most:
                part = os.read(fd, _READ_BYTES)
                if not part:
                    return bytes(parts) or None
                parts += part
        return bytes(parts)

    def ask_where(self) -> None:
        """Makes it print its Python stack, for `place`."""
        self.was_asked_where = True
        with suppress(ProcessLookupError):
            self.process.send_signal(WHERE_SIGNAL)

    def place(self, file: str | None) -> str:
        """file:line where the last printed stack stands, in `file` if it does; empty if none was printed."""
        _, _, stack = bytes(self._tail).rpartition(b"(most recent call first)")
        frames = [(name.decode(errors="replace"), int(line)) for name, line in _FRAME.findall(stack)]
        frames = [frame for frame in frames if "/ratoon/rewards/" not in frame[0]]
        for name, line in frames:
            if name == file:
                return f"{name}:{line}"
        return f"{frames[0][0]}:{frames[0][1]}" if frames else ""

    def last_words(self) -> str:
        """The last line that a function printed, empty if there is none."""
        printed = re.split(rb"^(?:Fatal Python error|Current thread)", self._tail, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else ""

    def how_it_ended(self, patience_s: float = 0.5) -> str:
        """In words, once it has hung up."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        status = self.process.poll()
        if status is None:
            return "closed the pipes to the run, or wrote into them"
        if status < 0:
            return f"was ended by signal {_signal_name(-status)}"
        return f"ended with exit status {status}"

    def kill(self) -> None:
        """Ends it with every process it has started, and closes the pipes."""
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for descendant in descendants:  # those that left the session
            with suppress(psutil.Error):
                descendant.kill()
        with suppress(subprocess.TimeoutExpired):  # a process in a dead file system does not even end by SIGKILL
            self.process.wait(5.0)
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
