"""What a run's phases take of memory, measured, beside what was predicted for them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ratoon.loop.memory_policy import MemoryChoice
from ratoon.loop.run_memory import RowCounts
from ratoon.planner.memory_sizes import GIB, MIB

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

_TOLERATED = 1.1
"""Measured over predicted, beyond which a prediction is called wrong."""

_SLACK_BYTES = {"cuda": 256 * MIB, "cpu": GIB}
"""Not worth a word. A process on a CPU also has memory that its tensors have left behind."""

_PHASE_OF = {"generate": "generate", "evaluate": "generate", "update": "update", "reference": "update"}
"""By the run's phase, what the estimate counts it as; others are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """One step's highest."""

    peak_bytes: int | None
    """Measured over its phases; None where this machine does not tell."""

    predicted_bytes: int | None
    """For its own largest microbatch, from the second step on; None where the model's size is not known."""

    warning: str | None = None

    def metrics(self) -> Mapping[str, float | None]:
        """As they stand in metrics.jsonl."""
        return {
            "memory_peak_gib": None if self.peak_bytes is None else self.peak_bytes / GIB,
            "memory_predicted_gib": None if self.predicted_bytes is None else self.predicted_bytes / GIB,
        }


class MemoryWatch:
    """Measures each phase by itself: on a GPU what the allocator gave out, on a CPU the process's resident memory, less
    what it had when this was made, which is before the model is loaded."""

    def __init__(self, choice: MemoryChoice, device: torch.device) -> None:
        self._choice = choice
        self._device = device
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._baseline = 0 if device.type == "cuda" else _status_bytes("VmRSS") or 0

    def enter(self, phase: str) -> None:
        """Tells which phase begins; the one before it is over."""
        self._finish()
        self._phase = phase
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # then the highest of the whole process is what is measured
                _CLEAR_REFS.write_text("5")

    def of_step(self, updates: list[list[RowCounts]]) -> StepMemory:
        """Of the phases since the last call. updates: this rank's microbatches of each."""
        self._finish()
        peaks = {"generate": 0, "update": 0}
        for phase, num_bytes in self._peaks.items():
            counted_as = _PHASE_OF.get(phase)
            if counted_as is not None:
                peaks[counted_as] = max(peaks[counted_as], num_bytes)
        self._phase, self._peaks = None, {}
        memory = self._choice.memory
        estimate = None if memory is None else memory.of_updates(updates, self._choice.recompute)
        peak = max(peaks.values())
        return StepMemory(
            peak_bytes=peak or None,
            predicted_bytes=None if estimate is None else max(estimate.update_bytes, estimate.by_phase["generate"]),
            warning=None if estimate is None else self._warning(peaks["update"], estimate.update_bytes),
        )

    def _finish(self) -> None:
        if self._phase is None:
            return
        peak = self._peak_bytes()
        if peak is not None:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), peak)

    def _peak_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        resident = _status_bytes("VmHWM")
        return None if resident is None else max(resident - self._baseline, 0)

    def _warning(self, peak: int, predicted: int) -> str | None:
        """Where the prediction is too low, and the largest step, off by as much, would not fit."""
        largest, usable = self._choice.predicted, self._choice.device.usable_bytes
        assert largest is not None, "one step is predicted by what predicts the largest"
        foreseen = largest.update_bytes / predicted * peak
        if peak <= max(_TOLERATED * predicted, predicted + _SLACK_BYTES[self._device.type]) or foreseen <= usable:
            return None
        return (
            f"memory: the update took {peak / GIB:.1f} GiB, and {predicted / GIB:.1f} were predicted for it; so the "
            f"largest step would take {foreseen / GIB:.1f} of the {usable / GIB:.1f} GiB that may be filled; if memory "
            'runs out, lower planner.max_rows_per_microbatch, or set model.recompute = "full"'
        )


def _status_bytes(name: str) -> int | None:
    """A line of /proc/self/status; None where there is no such file."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
