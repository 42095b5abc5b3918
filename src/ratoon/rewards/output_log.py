"""What reward functions print, as far as it is kept."""

import sys
import threading
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 8_000_000
"""Of a file, the output of earlier runs into it included: a function that prints without end fills no disk."""

_HELD_BYTES = 1 << 16
_DROPPED = b"\n(8 MB are reached: what reward functions print from here on is dropped)\n"


class OutputLog:
    """Holds the beginning of what is printed until somebody says where it goes. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: bytearray | None = bytearray()
        """None once it is known where output goes."""
        self._path: Path | None = None
        self._room = MAX_BYTES

    def open(self, path: Path | None) -> None:
        """From now on, and what is held: appended to `path`, which is made when something is printed.

        path: None is this process's standard error.
        """
        with self._lock:
            self._path = path
            if path is not None and path.exists():
                self._room = MAX_BYTES - path.stat().st_size
            held, self._held = self._held, None
            if held:
                self._pass_on(bytes(held))

    def add(self, data: bytes) -> None:
        """Whatever cannot be written is dropped: printing must not end a run."""
        with self._lock:
            if self._held is not None:
                self._held += data[: _HELD_BYTES - len(self._held)]
            elif data:
                self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        if self._room <= 0:
            return
        kept = data[: self._room]
        self._room -= len(data)
        if self._room <= 0:
            kept += _DROPPED
        with suppress(OSError):
            if self._path is None:
                sys.stderr.buffer.write(kept)
                sys.stderr.flush()
            else:
                with self._path.open("ab") as file:
                    file.write(kept)
