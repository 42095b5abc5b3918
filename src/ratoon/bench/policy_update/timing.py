"""How long a step takes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_MIN_STEPS = 2
_MAX_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Timed steps, in seconds."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def time_steps(first_s: float, step: Callable[[], float], budget_s: float) -> Steps:
    """Steps for about `budget_s`, the first of which has been timed: 2 at least, 12 at most."""
    num_steps = min(_MAX_STEPS, max(_MIN_STEPS, int(budget_s / max(first_s, 1e-9))))
    return Steps(samples_s=(first_s, *(step() for _ in range(num_steps - 1))))


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """One call, waited for: by CUDA events on a GPU, by the wall clock elsewhere."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3
