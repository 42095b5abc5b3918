"""Timings are medians of as many repeats as the budget holds; the GPU's clock is not the host's."""

import time

import pytest
import torch

from ratoon.bench.attention import timing
from ratoon.bench.attention.timing import copy_tb_per_s, matmul_tflops, time_call

CPU = torch.device("cpu")


@pytest.mark.parametrize(("call_s", "budget_s", "repeats"), [(0.02, 0.0, 3), (0.01, 0.055, 5), (0.0, 10.0, 100)])
def test_repeats_follow_the_budget(call_s: float, budget_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * call_s)
    calls: list[None] = []
    samples = time_call(lambda: calls.append(None), CPU, budget_s)
    assert samples.repeats == repeats
    assert len(calls) == repeats + 1  # one untimed
    assert samples.median_ms == pytest.approx(call_s * 1e3)


def test_figures_of_uneven_samples():
    samples = timing._summary([5.0, 1.0, 3.0, 2.0, 100.0, 4.0], [0.5, 0.1, 0.3])
    assert (samples.p20_ms, samples.median_ms, samples.p80_ms, samples.repeats) == (2.0, 3.5, 5.0, 6)
    assert samples.host_ms == 0.3


def test_rates_count_what_they_say(monkeypatch: pytest.MonkeyPatch):
    one_ms = timing.Samples(median_ms=1.0, p20_ms=1.0, p80_ms=1.0, repeats=3, host_ms=1.0)
    monkeypatch.setattr(timing, "time_call", lambda *_: one_ms)
    assert matmul_tflops(CPU, 1.0) == pytest.approx(2 * 512**3 / 1e-3 / 1e12)
    assert copy_tb_per_s(CPU, 1.0) == pytest.approx(2 * 2**26 / 1e-3 / 1e12)


class FakeEvent:
    """Counts device time in ms: the cache's overwriting, and calls, take some."""

    device_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = FakeEvent.device_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.at >= 0 and end.at >= 0
        return end.at - self.at


def test_gpu_times_leave_out_the_overwritten_cache(monkeypatch: pytest.MonkeyPatch):
    overwritten: list[float] = []

    class Cache:
        def zero_(self) -> None:
            FakeEvent.device_ms += 1000.0
            overwritten.append(FakeEvent.device_ms)

    def call() -> None:
        FakeEvent.device_ms += 2.0

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "empty", lambda size, **_: Cache() if size >= 2**28 else None)
    samples = time_call(call, torch.device("cuda", 0), 0.0)
    assert samples.median_ms == samples.p20_ms == samples.p80_ms == 2.0
    assert len(overwritten) == samples.repeats == 3
    assert samples.host_ms < 1.0


@pytest.mark.gpu
def test_the_gpu_clock_measures_the_gpu():
    """A product whose time is known from its rate, queued faster than it runs."""
    device = torch.device("cuda", 0)
    rate = matmul_tflops(device, 0.5)
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    samples = time_call(lambda: square @ square, device, 0.1)
    assert samples.median_ms == pytest.approx(2 * 4096**3 / rate / 1e9, rel=0.5)
    assert samples.host_ms < samples.median_ms
    assert samples.p20_ms <= samples.median_ms <= samples.p80_ms
