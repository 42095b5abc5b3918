"""How long a step takes."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ratoon.trainer import MasterOptimizer

_MIN_STEPS = 2
_MAX_STEPS = 12
_OPTIMIZER_STEPS = 3


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


def optimizer_seconds(model: nn.Module, device: torch.device) -> float | None:
    """One update of the weights from the gradients that the model has, which are used up: their norm, AdamW, and the
    values back in the model's dtype. None where the memory does not suffice, which is found out by trying.

    The learning rate is 0, so that the weights stay as they are.
    """
    samples_s: list[float] = []
    try:
        optimizer = MasterOptimizer(model.parameters(), learning_rate=0.0, weight_decay=0.01, betas=(0.9, 0.999))
        optimizer.accumulate()
        gradients = [master.grad for master in optimizer.masters]
        for _ in range(1 + _OPTIMIZER_STEPS):  # the first makes the moments
            for master, gradient in zip(optimizer.masters, gradients, strict=True):
                master.grad = gradient
            samples_s.append(seconds_of(lambda: optimizer.step(learning_rate=0.0, max_grad_norm=1.0), device))
    except torch.OutOfMemoryError:
        return None
    return statistics.median(samples_s[1:])


def gpu_idle_fraction(step: Callable[[], object]) -> float:
    """Part of the time from a step's first kernel to the end of its last in which no kernel and no copy ran."""
    torch.cuda.synchronize()
    # Without the host's own events, whose recording would keep it from being ahead.
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return idle_fraction((event["ts"], event["ts"] + event["dur"]) for event in on_gpu)


def idle_fraction(spans: Iterable[tuple[float, float]]) -> float:
    """Of spans (start, end) that may overlap: the part between the first start and the last end that none covers."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0
    first = covered_to = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(end - max(start, covered_to), 0.0)
        covered_to = max(covered_to, end)
    return 1.0 - busy / max(covered_to - first, 1e-9)
