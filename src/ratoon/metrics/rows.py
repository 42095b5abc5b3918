"""One line of metrics.jsonl: how it is written, and read back."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.types import UserError

MetricValue = float | int | str | bool | None

PHASE_SECONDS_PREFIX = "seconds_in_"
"""Begins the key of a phase's seconds, counted since the previous row of the file."""

NOT_FINITE_KEY = "not_finite"
"""Names the values that JSON cannot hold; they are written as null."""

_MAX_INT = 2**128
"""No count comes near it, and a float can hold it."""

_RESERVED = ("step", "phase", "unix_s", NOT_FINITE_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """What was measured at one step of one phase."""

    step: int
    phase: str
    unix_s: float
    """When it was written, in seconds since 1970."""

    values: Mapping[str, MetricValue]
    """By name, unit included. NaN and infinities come back as floats."""

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds that spans took since the previous row."""
        return {
            name.removeprefix(PHASE_SECONDS_PREFIX): float(value)
            for name, value in self.values.items()
            if name.startswith(PHASE_SECONDS_PREFIX) and isinstance(value, int | float) and math.isfinite(value)
        }


def _plain_value(name: str, value: Any) -> MetricValue:
    """A Python number, string, bool or None from that or from a one-element array or tensor."""
    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"metric {name!r} must be a number, string, bool or None, got {type(value).__name__}: {value!r}")


def row_to_json(row: MetricsRow) -> str:
    """One line of strict JSON, without its newline.

    NaN and infinities, which JSON lacks, become null, and `not_finite` says which of them stood there.
    """
    record: dict[str, Any] = {"step": row.step, "phase": row.phase, "unix_s": row.unix_s}
    not_finite: dict[str, str] = {}
    for name, given in row.values.items():
        if name in _RESERVED:
            raise ValueError(f"metric name {name!r} is taken by the row itself; choose another")
        value = _plain_value(name, given)
        if isinstance(value, float) and not math.isfinite(value):
            not_finite[name] = str(value)
            value = None
        record[name] = value
    if not_finite:
        record[NOT_FINITE_KEY] = not_finite
    return json.dumps(record, allow_nan=False)


def row_from_json(line: str) -> MetricsRow:
    """Inverse of `row_to_json`. Raises ValueError for anything else."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    match record:
        case {"step": int(step), "phase": str(phase)}:
            pass
        case _:
            raise ValueError(f"a row is an object with step and phase, got {line[:80]!r}")
    not_finite, unix_s = record.get(NOT_FINITE_KEY, {}), record.get("unix_s", math.nan)
    if not isinstance(not_finite, dict) or not isinstance(unix_s, int | float):
        raise ValueError(f"{NOT_FINITE_KEY} must be an object and unix_s a number, got {not_finite!r} and {unix_s!r}")
    values = {name: _plain_value(name, value) for name, value in record.items() if name not in _RESERVED}
    values.update({name: float(str(text)) for name, text in not_finite.items()})
    if any(isinstance(number, int) and abs(number) > _MAX_INT for number in (step, unix_s, *values.values())):
        raise ValueError(f"a number in it is above {_MAX_INT:,}")
    return MetricsRow(step=step, phase=phase, unix_s=float(unix_s), values=values)


def split_metrics(path: Path) -> tuple[list[str], str]:
    """The whole lines of a file, and what follows the last of them: "" unless a write was cut short."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the metrics.jsonl of a run folder") from None
    *lines, tail = text.split("\n")
    return lines, tail


def parse_metrics(path: Path, lines: list[str]) -> list[MetricsRow]:
    """Rows of `lines`, which stand in `path`. Raises UserError naming the line that is no row."""
    rows: list[MetricsRow] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(row_from_json(line))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is not a metrics row ({error}); remove that line, or start anew with --fresh"
            ) from error
    return rows


def read_metrics(path: str | Path) -> list[MetricsRow]:
    """All rows of a metrics.jsonl, in the order written; also while a run is still writing it.

    A last line that was cut short is left out. Raises UserError naming file and line for any other damage.
    """
    lines, _ = split_metrics(Path(path))
    return parse_metrics(Path(path), lines)
