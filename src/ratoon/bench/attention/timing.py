"""How long a call takes, and the two rates that a floor is made of."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CACHE_BYTES = 256 * 2**20
"""Written before every timed call: several times the last-level cache of any GPU."""

_MIN_REPEATS = 3
_MAX_REPEATS = 100

MATMUL_SIZE = 8192
_CPU_MATMUL_SIZE = 512
_COPY_BYTES = 2**31
_CPU_COPY_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Repeated timings of one call, in ms."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int

    host_ms: float
    """Median time in which Python and the driver queued the call: it is part of the others only where it is longer
    than what the device does."""


def time_call(call: Callable[[], object], device: torch.device, budget_s: float) -> Samples:
    """Repeats the call for about `budget_s`: at least 3 times, at most 100. One untimed call goes first.

    On a GPU by CUDA events in the stream, with the last-level cache overwritten before each. Calls are queued without
    waiting for one another, as a training step queues its layers.
    """
    if device.type != "cuda":
        return _time_on_host(call, budget_s)
    once_s = _seconds(call)
    repeats = _num_repeats(once_s, budget_s)
    cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    host_ms: list[float] = []
    for start, end in zip(starts, ends, strict=True):
        cache.zero_()
        start.record()
        queued = time.perf_counter()
        call()
        host_ms.append((time.perf_counter() - queued) * 1e3)
        end.record()
    torch.cuda.synchronize(device)
    return _summary([start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)], host_ms)


def matmul_tflops(device: torch.device, budget_s: float) -> float:
    """The rate of a square bf16 product of size 8192 on a GPU (on a CPU of float32 and 512), the practical ceiling."""
    is_gpu = device.type == "cuda"
    size, dtype = (MATMUL_SIZE, torch.bfloat16) if is_gpu else (_CPU_MATMUL_SIZE, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    samples = time_call(lambda: left @ right, device, budget_s)
    return 2 * size**3 / samples.median_ms / 1e9


def copy_tb_per_s(device: torch.device, budget_s: float) -> float:
    """Bytes read and bytes written in a copy of 2 GiB (64 MiB on a CPU), both counted, a second, in 10^12."""
    num_bytes = _COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    samples = time_call(lambda: target.copy_(source), device, budget_s)
    return 2 * num_bytes / samples.median_ms / 1e9


def _time_on_host(call: Callable[[], object], budget_s: float) -> Samples:
    call()
    samples_ms: list[float] = [_seconds(call) * 1e3]
    while len(samples_ms) < _num_repeats(samples_ms[0] / 1e3, budget_s):
        samples_ms.append(_seconds(call) * 1e3)
    return _summary(samples_ms, samples_ms)


def _num_repeats(once_s: float, budget_s: float) -> int:
    return min(_MAX_REPEATS, max(_MIN_REPEATS, math.floor(budget_s / max(once_s, 1e-9))))


def _seconds(call: Callable[[], object]) -> float:
    """One call, waited for."""
    _synchronize()
    started = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(samples_ms: list[float], host_ms: list[float]) -> Samples:
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return Samples(
        median_ms=statistics.median(ordered),
        p20_ms=ordered[round(0.2 * last)],
        p80_ms=ordered[round(0.8 * last)],
        repeats=len(ordered),
        host_ms=statistics.median(host_ms),
    )
