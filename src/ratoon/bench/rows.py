"""One benchmark row: what was run, where, with what, and what came out."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from ratoon.types.errors import UserError

_PACKAGES = (
    *("torch", "transformers", "triton", "numpy"),
    *("flash-attn-4", "flash-attn-3", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13", "vllm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One line of `benchmarks/results/NAME.jsonl`."""

    bench: str
    case: Mapping[str, Any]
    impl: str
    layout: Literal["shared", "replicated"]
    peer: bool
    """Someone else's way of doing the same work."""

    figures: Mapping[str, float | int | str | bool | None]
    """By name, unit included."""

    command: str

    def to_json(self) -> str:
        record = {
            "bench": self.bench,
            "case": dict(self.case),
            "impl": self.impl,
            "layout": self.layout,
            "peer": self.peer,
            **self.figures,
            "device": device_name(),
            "versions": versions(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
        }
        return json.dumps(record)


def check_results(path: Path | None) -> None:
    """Before anything is measured: raises UserError where rows could not be appended. Leaves no file behind."""
    if path is not None:
        is_new = not os.path.lexists(path)  # nor a link to nothing, which is the user's
        append_rows(path, [])
        if is_new:
            path.unlink()


def append_rows(path: Path, rows: list[BenchRow]) -> None:
    """Adds rows to a results file; it is a log, and earlier rows stay. A last line that a killed run cut off is ended.

    Raises UserError where that cannot be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.writelines(row.to_json().encode() + b"\n" for row in rows)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--results: rows cannot be appended to {str(path)!r}: {reason}; name another file") from error


def device_name() -> str:
    """The GPU's name, or the CPU's with the threads torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of Python, of what is installed, and of CUDA where torch has it."""
    found = {"python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """The commit the code was run from, with `-dirty` behind it where files differ; `unknown` outside a checkout.

    Asked once a process: what was loaded does not change.
    """
    try:
        folder = Path(__file__).parent
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/src"],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head
