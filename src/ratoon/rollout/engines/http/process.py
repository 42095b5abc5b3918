"""A server that runs as long as we do: started as a child, watched, and ended with all that it started."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ratoon.rollout.engines.http import keeper
from ratoon.types import UserError

_TAIL_BYTES = 64 << 10
_EXCEPTION = re.compile(r"(?:^|\] +)([\w.]*(?:Error|Exception)): .+")
"""Python's last line of a traceback, alone or behind a logger's prefix; not one that a hint quotes."""

_COMPLAINT = re.compile(r"error|exception|cannot|could not|failed|killed|out of memory", re.IGNORECASE)
_NUM_LINES = 8


class ServerProcess:
    """One child. `keeper` stands between: it ends the server's whole process group when we end, however we end."""

    def __init__(self, command: Sequence[str], environment: Sequence[str], *, log: Path, folder: Path) -> None:
        """environment: "NAME=value" entries beside our own variables. log: what it prints is put behind what is there.
        folder: removed when we end, should we not be able to any more.

        Raises UserError where the command's program is not there.
        """
        self.log = log
        program = find_program(command[0])
        variables = dict(os.environ) | dict(entry.split("=", 1) for entry in environment)
        # One process, not one of ours: a launcher's variables would make it join our ranks.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(name, None)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, str(folder), os.path.abspath(program), *command[1:]],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the keeper, whose only child is the server."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs. 128 + N where signal N ended it."""
        return self._process.poll()

    def stop(self) -> None:
        """End it, asking first. Waits at most for the keeper's grace and a little more; a second call does nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the keeper's sign
        try:
            self._process.wait(keeper.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the server dies with it
            self._process.wait()

    def last_complaints(self) -> str:
        """The last lines of its log that name an exception, or else tell of an error, or else the last ones, indented;
        each once. For a message."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._start, size - _TAIL_BYTES))
            lines = [line.rstrip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        named = [line[found.start(1) :] for line in lines if (found := _EXCEPTION.search(line))]
        chosen = named or [line for line in lines if _COMPLAINT.search(line)] or lines
        last = list(dict.fromkeys(reversed(chosen)))[:_NUM_LINES]  # one error is printed many times
        return "\n".join(f"  {line[:300]}" for line in reversed(last)) or "  (it printed nothing)"


def find_program(name: str) -> str:
    """The path of a command's program. Raises UserError where there is none."""
    program = shutil.which(name)
    if program is None:
        raise UserError(
            f"rollout.server.command begins with {name!r}, which is no program that can be run from {Path.cwd()}; give "
            "its path, such as that of the Python of the environment that vLLM is installed in"
        )
    return program


def describe_exit(status: int) -> str:
    """An exit status of `ServerProcess`, in words."""
    return f"it was killed by signal {status - 128}" if status > 128 else f"it ended with exit status {status}"


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
