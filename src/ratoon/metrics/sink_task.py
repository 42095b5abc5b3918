"""What one sink is to copy, and where to."""

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ratoon.metrics.config import SinkName

SINKS_FOLDER = "sinks"
"""In the run's folder: the run's identity, and of each sink its log, its lock, and how far it has come."""

_IDENTITY_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTask:
    """Everything that a sink's process is told. Paths are absolute."""

    sink: SinkName
    run_dir: str
    metrics_path: str
    run_name: str
    run_id: str
    """The same for every process of a run, however often it is resumed."""

    project: str
    entity: str | None
    group: str | None
    tensorboard_dir: str
    timeout_s: float
    parent_pid: int
    """The training process: the sink ends when that does."""

    @property
    def folder(self) -> Path:
        return Path(self.run_dir, SINKS_FOLDER)

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.sink}.log"

    @property
    def destination(self) -> list[str | None]:
        """Rows that went elsewhere do not count as sent."""
        return [self.run_id, self.project, self.entity]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SinkTask":
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def run_id_of(run_dir: Path, run_name: str) -> str:
    """The identity that tools know the run by, made on the first call and kept in its folder.

    A copy of the folder under another name is another run, and gets an identity of its own.
    """
    path = run_dir / SINKS_FOLDER / _IDENTITY_FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["run_name"] == run_name and isinstance(stored["run_id"], str):
            return stored["run_id"]
    run_id = secrets.token_hex(6)
    write_whole(path, json.dumps({"run_name": run_name, "run_id": run_id}))
    return run_id


def write_whole(path: Path, text: str) -> None:
    """Puts `text` in the place of what `path` holds; a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
