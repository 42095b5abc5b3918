"""Every case with every implementation and peer: made, checked, timed, and written down before the next begins."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from ratoon.attention import AttentionPlan
from ratoon.bench.attention.candidates import (
    CPU_IMPLS,
    GPU_IMPLS,
    OUR_IMPLS,
    Candidate,
    Work,
    make_ours,
    make_work,
)
from ratoon.bench.attention.cases import AttentionCase, choose_cases
from ratoon.bench.attention.check import Errors, Expected, check, expect
from ratoon.bench.attention.peers import PEERS, make_peer
from ratoon.bench.attention.tables import LABEL_WIDTH, floors_line, measured_line
from ratoon.bench.attention.timing import Samples, copy_tb_per_s, matmul_tflops, time_call
from ratoon.bench.choosing import choose_names
from ratoon.bench.outcome import Outcome, free_memory
from ratoon.bench.rows import BenchRow, append_rows

_RATE_BUDGET_S = 1.0
_COMPILED_SHAPES = 64
"""FlexAttention is compiled anew for each case; torch gives up after 8 of one function."""

_GPU_TIMING = (
    "CUDA events around each call, queued without waiting, last-level cache overwritten before; Python's overhead is "
    "inside where it is longer than the kernels (see host_ms); the forward pass records its graph, as training does"
)
_CPU_TIMING = "wall clock of each call, Python's overhead inside; the forward pass records its graph, as training does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What this device reached in this run."""

    matmul_tflops: float
    copy_tb_per_s: float


def bench_attention(
    *,
    cases: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    budget_s: float,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Checks and times forward and backward of each case under each name.

    cases, impls, peers: names; None takes what the case has by default (on a CPU no peers, all of which need a GPU),
    ["none"] no implementation or no peer.
    budget_s: about how long one direction of one candidate is timed.
    results: each row is appended as soon as it is measured, so that a run that is killed keeps what it has.
    Raises UserError for a name that does not exist, before anything runs.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    is_gpu = device.type == "cuda"
    chosen = choose_cases(cases, has_gpu=is_gpu)
    our_names = choose_names(impls, OUR_IMPLS, GPU_IMPLS if is_gpu else CPU_IMPLS, "implementation")
    choose_names(peers, PEERS, PEERS, "peer")  # a wrong name is found before anything is measured
    outcome = Outcome()
    with _compiler_set_for_timing():
        rates = Rates(
            matmul_tflops=matmul_tflops(device, _RATE_BUDGET_S), copy_tb_per_s=copy_tb_per_s(device, _RATE_BUDGET_S)
        )
        say(f"matrix product {rates.matmul_tflops:.4g} TFLOP/s, copy {rates.copy_tb_per_s:.3g} TB/s (read and written)")
        for case in chosen:
            names = [(name, False) for name in our_names]
            names += [(name, True) for name in choose_names(peers, PEERS, case.peers if is_gpu else (), "peer")]
            run = _CaseRun(case=case, device=device, rates=rates, budget_s=budget_s, command=command)
            say(floors_line(case, rates.matmul_tflops, rates.copy_tb_per_s, run.work.q_THD.element_size()))
            for name, is_peer in names:
                row = run.measure(name, is_peer, outcome, say)
                if row is not None:
                    outcome.rows.append(row)
                    if results is not None:
                        append_rows(results, [row])
                    say(measured_line(row))
    return outcome


@contextmanager
def _compiler_set_for_timing() -> Iterator[None]:
    """Compiled graphs may be run backwards more than once, and in as many shapes as there are cases."""
    with functorch_config.patch(donated_buffer=False), dynamo_config.patch(recompile_limit=_COMPILED_SHAPES):
        yield


class _CaseRun:
    """One case's inputs, exact answer and plan, shared by all that do it."""

    def __init__(
        self, *, case: AttentionCase, device: torch.device, rates: Rates, budget_s: float, command: str
    ) -> None:
        self.case, self.rates, self.budget_s, self.command = case, rates, budget_s, command
        self.work: Work = make_work(case, device)
        self.plan = AttentionPlan.build(case.layout, device=device, window=case.window)
        self.expected: Expected = expect(self.work)

    def measure(self, name: str, is_peer: bool, outcome: Outcome, say: Callable[[str], None]) -> BenchRow | None:
        """A row, or None with the reason said and noted."""
        free_memory()
        label = f"{name} (peer)" if is_peer else name
        # `forest_attention` refuses with ValueError.
        with outcome.noting(self.case.name, label, say, is_ours=not is_peer, refusals=(ValueError,), width=LABEL_WIDTH):
            return self._row(make_peer(name, self.work) if is_peer else make_ours(name, self.work, self.plan))
        return None

    def _row(self, candidate: Candidate) -> BenchRow:
        """Raises WrongResultError, and times nothing, where the check is red."""
        started = time.perf_counter()
        errors = check(candidate, self.work, self.expected)
        first_call_s = time.perf_counter() - started
        device = self.work.device
        peak_extra_gib = _peak_extra_gib(candidate) if device.type == "cuda" else None
        forward = time_call(candidate.forward, device, self.budget_s)
        out = candidate.forward()
        backward = time_call(
            lambda: torch.autograd.grad(out, candidate.leaves, candidate.dout, retain_graph=True),
            device,
            self.budget_s,
        )
        return BenchRow(
            bench="attention",
            case=self.case.key,
            impl=candidate.name,
            layout=candidate.layout,
            peer=candidate.is_peer,
            figures={
                "case_name": self.case.name,
                **self._speed("fwd", forward),
                **self._speed("bwd", backward),
                "matmul_tflops": self.rates.matmul_tflops,
                "copy_tb_per_s": self.rates.copy_tb_per_s,
                **self._check_figures(errors),
                "peak_extra_gib": peak_extra_gib,
                "first_call_s": first_call_s,
                "dtype": str(self.work.dtype).removeprefix("torch."),
                "num_rows": self.case.layout.num_rows,
                "dedup_ratio": self.case.layout.dedup_ratio,
                **candidate.details,
                "timing": _GPU_TIMING if device.type == "cuda" else _CPU_TIMING,
            },
            command=self.command,
        )

    def _speed(self, direction: str, samples: Samples) -> dict[str, float]:
        flops = self.case.forward_flops if direction == "fwd" else self.case.backward_flops
        floors_ms = self.case.floors_ms(
            matmul_tflops=self.rates.matmul_tflops,
            copy_tb_per_s=self.rates.copy_tb_per_s,
            element_size=self.work.q_THD.element_size(),
        )[direction]
        tflops = flops / samples.median_ms / 1e9
        return {
            f"{direction}_ms": samples.median_ms,
            f"useful_tflops_{direction}": tflops,
            f"{direction}_of_matmul": tflops / self.rates.matmul_tflops,
            f"{direction}_floor_ms": max(floors_ms),
            f"{direction}_p20_ms": samples.p20_ms,
            f"{direction}_p80_ms": samples.p80_ms,
            f"{direction}_host_ms": samples.host_ms,
            f"{direction}_repeats": samples.repeats,
        }

    def _check_figures(self, errors: Errors) -> dict[str, float]:
        return {
            "max_error": errors.max_error,
            "rms_error": errors.rms_error,
            "max_error_eager": self.expected.eager.max_error,
            "rms_error_eager": self.expected.eager.rms_error,
            "checked_kv_heads": len(self.expected.kv_heads),
        }


def _peak_extra_gib(candidate: Candidate) -> float:
    """Most memory above the inputs during forward and backward: output, what is saved, gradients, scratch."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(candidate.forward(), candidate.leaves, candidate.dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
