"""The file a run writes its measurements to."""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ratoon.metrics.phase_clock import PhaseClock
from ratoon.metrics.rows import (
    PHASE_SECONDS_PREFIX,
    MetricsRow,
    parse_metrics,
    read_metrics,
    row_to_json,
    split_metrics,
)
from ratoon.metrics.sinks import Ending, Sinks
from ratoon.types import UserError

WARM_START_PHASE = "sft"
"""Counts its own steps, before the first step of everything else."""


class MetricsLog:
    """Appends one JSON object a line to metrics.jsonl, and knows where the time went.

    Each row also holds the seconds of every phase whose span ended since the row before (`seconds_in_generate`, ...),
    so that a second stands in exactly one row, and a resumed run finds its earlier ones in the file.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        warn: Callable[[str], object] = warnings.warn,
        sinks: Sinks | None = None,
    ) -> None:
        """Opens `path` for appending, parent folders made; None measures without writing (ranks other than 0).

        A last line that a crash cut short is removed, and `warn` is told so. sinks: copy the file elsewhere, from the
        first row that is logged here to the end.
        """
        self.path = None if path is None else Path(path)
        self._warn = warn
        self._clock = PhaseClock()
        self._file: TextIO | None = None
        self._sinks = sinks
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._restore(self._repaired_rows())
        self._file = self.path.open("a", encoding="utf-8", newline="\n")

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Counts the body's seconds for `phase`: generate, reward, plan, update, evaluate, checkpoint, sft, ...

        Inside another span, they count for the inner one only.
        """
        return self._clock.span(phase)

    @property
    def total_seconds(self) -> dict[str, float]:
        """Seconds by phase of the whole run, earlier processes of a resumed run included."""
        return self._clock.total_s

    def log(self, step: int, phase: str, **values: Any) -> MetricsRow:
        """Writes one row and flushes it to the operating system.

        step: steps (a rollout and its updates) done so far: the first one's row is step 1, a first evaluation's step 0.
        values: numbers (also NaN and infinities), strings, bools or None, by name, unit included.
        Raises UserError if the file is no longer where it was: rows would go nowhere, and unnoticed.
        """
        seconds = {PHASE_SECONDS_PREFIX + name: round(value, 6) for name, value in self._clock.take_recent().items()}
        clash = seconds.keys() & values.keys()
        if clash:
            raise ValueError(f"metric names {sorted(clash)} are taken by spans; choose others")
        row = MetricsRow(step=int(step), phase=phase, unix_s=round(time.time(), 3), values={**values, **seconds})
        line = row_to_json(row)
        if self._file is not None:
            self._require_in_place(self._file)
            self._file.write(line + "\n")
            self._file.flush()
            if self._sinks is not None:
                self._sinks.follow()
        return row

    def find(self, phase: str, step: int | None = None) -> MetricsRow | None:
        """The last row of `phase` (at `step`, if given), or None: how a resumed run knows what it has done already."""
        if self.path is None:
            return None
        for row in reversed(read_metrics(self.path)):
            if row.phase == phase and step in (None, row.step):
                return row
        return None

    def truncate_after(self, step: int) -> int:
        """Removes rows of steps after `step`, which a run resumed from that step's checkpoint takes again.

        Rows of the warm start, which counts its own steps, stay, unless `step` is negative, which removes everything.
        Returns how many rows went. Their seconds leave the totals too.
        """
        if self.path is None:
            return 0
        assert self._file is not None, "the metrics log is closed"
        assert self._sinks is None or not self._sinks.is_started, "rows go before the sinks read the file"
        rows = read_metrics(self.path)
        kept = [row for row in rows if step >= 0 and (row.step <= step or row.phase == WARM_START_PHASE)]
        if len(kept) < len(rows):
            self._file.close()
            self._rewrite([row_to_json(row) for row in kept])
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
            self._restore(kept)
        return len(rows) - len(kept)

    def close(self, ending: Ending = "complete", *, wait: bool = True) -> None:
        """Closes the file; a later `log` is a mistake. Tells the sinks how the run ended, and waits for them."""
        if self._file is not None:
            # What a full disk did not take is tried once more here; the `log` that failed has said so.
            with suppress(OSError):
                self._file.close()
        if self._sinks is not None:
            self._sinks.close(ending, wait=wait)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Who presses Ctrl-C twice wants to wait for nothing.
        self.close("complete" if error is None else "failed", wait=not isinstance(error, KeyboardInterrupt))

    def _require_in_place(self, file: TextIO) -> None:
        assert self.path is not None, "an open file has a path"
        try:
            is_in_place = os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            is_in_place = False
        if not is_in_place:
            raise UserError(
                f"{self.path} was removed, moved or replaced while the run was writing it, and the run ends here: "
                "what it measures would be lost. Put its folder back and run the same command again, or start anew"
            )

    def _repaired_rows(self) -> list[MetricsRow]:
        """Rows of the file, after removing a last line that was cut short."""
        assert self.path is not None, "only a file can be repaired"
        lines, tail = split_metrics(self.path)
        rows = parse_metrics(self.path, lines)
        if tail:
            self._rewrite(lines)
            self._warn(
                f"{self.path}: removed an unfinished last line ({len(tail)} characters), left by a run that was killed"
            )
        return rows

    def _rewrite(self, lines: list[str]) -> None:
        assert self.path is not None, "only a file can be rewritten"
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)

    def _restore(self, rows: list[MetricsRow]) -> None:
        self._clock.forget()
        for row in rows:
            for phase, seconds in row.seconds_by_phase.items():
                self._clock.add_past(phase, seconds)
