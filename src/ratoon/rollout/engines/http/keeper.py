"""Runs one command, and ends it and all that it started when whoever asked for it is gone.

`python keeper.py FOLDER COMMAND...`, with a pipe as standard input whose other end the owner holds and never writes to:
the pipe's end is the owner's, by `kill -9` as well; FOLDER is removed then, as the owner would have done. Imports
nothing of Ratoon's, so that it starts in an instant.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
GRACE_S = 10.0
"""From the request to end to the kill."""

_POLL_S = 0.1


def main(folder: str, command: list[str]) -> int:
    """The command's exit status; 128 + N where signal N ended it."""
    is_alone = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the owner, which ends us
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_keeper)
    try:
        while process.poll() is None:
            readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
            if readable and not os.read(sys.stdin.fileno(), 1):
                is_alone = True
                _signal_group(process.pid, signal.SIGTERM)
                _wait(process, GRACE_S)
                break
    finally:
        # What the command started may outlive it, with the memory of a GPU.
        _signal_group(process.pid, signal.SIGKILL)
        if is_alone:
            shutil.rmtree(folder, ignore_errors=True)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _die_with_keeper() -> None:
    """In the child, before the command: should the keeper itself be killed, the command is too. Linux only."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
