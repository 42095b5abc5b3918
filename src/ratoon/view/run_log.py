"""run.log: every line a run printed, with the time."""

from contextlib import suppress
from datetime import datetime
from pathlib import Path


class RunLog:
    """Appends lines to a file; call it with text."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending, parent folders made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def __call__(self, text: str) -> None:
        """Writes each line of `text` behind the local time, and flushes."""
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        for line in text.splitlines() or [""]:
            self._file.write(f"{now}  {line}\n")

    def close(self) -> None:
        # What a full disk did not take is tried once more here; the write that failed has said so.
        with suppress(OSError):
            self._file.close()
