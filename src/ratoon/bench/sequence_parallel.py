"""One pack on one GPU, and held by several together: the same update, timed both ways after its gradients are compared.

Every rank first does the whole pack by itself, all at the same time, then all of them do it together. Gradients are
held equal twice:

- On a slice (the model's first layers in float32, short groups of odd lengths) nearly to the last digit.
- At full size in bf16. Rows then meet other matrix products, whose rounding grows through the layers: the bound is as
  wide as that between two right ways on one GPU, and finds what breaks at size.
"""

# Shape letters: P prompt tokens, R response tokens, N responses of a group, U ranks.

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ratoon.bench import choosing
from ratoon.bench.outcome import Outcome, Unmeasured, WrongResultError, free_memory
from ratoon.bench.policy_update import cases as update_cases
from ratoon.bench.policy_update.cases import Decoder, make_group
from ratoon.bench.policy_update.check import FULL_SIZE_GAP, SLICE_LAYERS, read_result, slice_groups
from ratoon.bench.policy_update.microbatches import Microbatch, kernels_of, pack_update
from ratoon.bench.policy_update.random_model import build_model, cut_copy
from ratoon.bench.policy_update.timing import Steps, seconds_of
from ratoon.bench.policy_update.variants import Variant
from ratoon.bench.rows import BenchRow, append_rows, device_name
from ratoon.distributed import DataParallel, SequenceGroup, ranks_mesh, sequence_group
from ratoon.layout import pack_groups
from ratoon.models import (
    attach,
    check_sequence_parallel,
    model_shape,
    set_recompute,
    set_sequence_parallel,
)
from ratoon.planner import peak_tflops, useful_flops
from ratoon.types import RolloutGroup, UserError

SLICE_GAP = 1e-3
"""Relative, of gradients of the slice. Sums in another order change those in float32 by 1e-6; heads or rows in a wrong
place, and a sum that is left out, by about 1."""

_VARIANT = "auto/full/none"
_SEED = 0
NEARLY_EQUAL_SUMS = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Their gradients say little at full size: with random weights they are differences of nearly equal sums."""


@dataclass(frozen=True, kw_only=True)
class PackCase:
    """One group, packed into one microbatch."""

    name: str
    decoder: Decoder
    P: int
    R: int
    N: int
    needs_gpu: bool = True
    is_default: bool = True

    @cached_property
    def groups(self) -> tuple[RolloutGroup, ...]:
        return (make_group(self.decoder.vocab_size, self.P, [self.R] * self.N, _SEED),)

    @property
    def num_rows(self) -> int:
        return self.P + self.N * self.R

    @property
    def key(self) -> dict[str, Any]:
        """The `case` of a result row."""
        return {"model": self.decoder.name, "P": self.P, "R": self.R, "N": self.N, "groups": 1}


_CASES = (
    PackCase(
        name="8b-cut-131072",
        decoder=replace(
            update_cases.CASES["8b-p8192-r1024-n16"].decoder, name="Qwen3-8B (8 of 36 layers)", num_layers=8
        ),
        P=65_536, R=4096, N=16,
    ),
    PackCase(
        name="1.7b-131072", decoder=update_cases.CASES["1.7b-p8192-r512-n16"].decoder,
        P=65_536, R=4096, N=16, is_default=False,
    ),
    PackCase(name="tiny", decoder=update_cases.CASES["tiny"].decoder, P=57, R=19, N=6, needs_gpu=False),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def bench_sequence_parallel(
    ranks: DataParallel,
    *,
    cases: Sequence[str] | None = None,
    num_steps: int,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Checks and times each case on one rank and on all ranks together. All ranks must call it; the first one says and
    writes what is found.

    cases: names; None takes the usual ones of the machine. num_steps: timed, after one that is not.
    Raises UserError for a name that does not exist, for heads that so many ranks cannot share, and for one rank alone.
    """
    if ranks.world_size == 1:
        raise UserError("sequence parallelism needs several ranks; start them with torchrun --nproc-per-node 2")
    has_gpu = torch.cuda.is_available()
    names = cases or [case.name for case in CASES.values() if case.needs_gpu == has_gpu and case.is_default]
    chosen = choosing.choose_cases(names, CASES, "pack", has_gpu=has_gpu)
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    group = sequence_group(ranks_mesh(device.type, ranks.world_size), timeout_s=ranks.timeout_s)
    say = say if ranks.is_main else _say_nothing
    outcome = Outcome()
    for case in chosen:
        run = _PackRun(case=case, ranks=ranks, group=group, device=device, command=command)
        try:
            rows = run.measure(num_steps, say)
        except WrongResultError as error:  # all ranks judge alike; any other error ends the run, on all of them
            say(f"  WRONG, no speed is reported: {error}")
            outcome.failed.append(Unmeasured(case_name=case.name, name="auto", reason=str(error)))
            rows = []
        outcome.rows.extend(rows)
        if results is not None and ranks.is_main:
            append_rows(results, rows)
        del run
        free_memory()
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What one way of doing the pack took, on the rank that decides."""

    steps: Steps
    first_call_s: float
    peak_gib: float | None

    figures: Mapping[str, float]
    """More of it."""


class _PackRun:
    """One case's model, and the gradients of one rank that had it all."""

    def __init__(
        self, *, case: PackCase, ranks: DataParallel, group: SequenceGroup, device: torch.device, command: str
    ) -> None:
        self.case, self.ranks, self.group, self.device, self.command = case, ranks, group, device, command
        self.model = build_model(case.decoder, device)
        self.shape = model_shape(self.model.config)
        check_sequence_parallel(self.shape, group.size)
        ranks.broadcast_parameters(self.model.parameters())
        set_recompute(self.model, Variant.named(_VARIANT).recompute)
        self.flops = useful_flops(self.shape, pack_groups(case.groups))

    def measure(self, num_steps: int, say: Callable[[str], None]) -> list[BenchRow]:
        """Raises WrongResultError, on all ranks, where gradients differ."""
        say(f"{self.case.name}: {self.case.decoder.name}, {self.case.num_rows:,} rows")
        slice_gap = self._slice_gap()
        say(f"  gradients of a slice differ by {slice_gap:.2g}")
        _refuse_over(slice_gap, SLICE_GAP, "on a slice")
        microbatch = self._pack(self.case.groups)
        alone = self._time(microbatch, num_steps, is_shared=False)
        # To the host: the peak of the other way is to be its own.
        expected = {name: grad.to("cpu") for name, grad in _gradients(self.model).items()}
        say(f"  1 rank    {alone.steps.median_s:.4g} s")
        together = self._time(microbatch, num_steps, is_shared=True)
        gaps = self._gaps(expected)
        speedup = alone.steps.median_s / together.steps.median_s
        say(f"  {self.group.size} ranks   {together.steps.median_s:.4g} s, {speedup:.3f} times as fast")
        says_much = [gap for name, gap in gaps.items() if not any(part in name for part in NEARLY_EQUAL_SUMS)]
        _refuse_over(max(says_much), FULL_SIZE_GAP, "at full size")
        found = {
            "speedup": speedup,
            "slice_gradient_gap": slice_gap,
            "gradient_gap": max(says_much),
            "gradient_gap_with_queries_and_keys": max(gaps.values()),
            **together.figures,
        }
        return [self._row(alone, 1, {"speedup": 1.0}), self._row(together, self.group.size, found)]

    def _pack(self, groups: Sequence[RolloutGroup]) -> Microbatch:
        (microbatch,) = pack_update(groups, Variant.named(_VARIANT), len(groups), self.device)
        return microbatch

    def _slice_gap(self) -> float:
        """Largest relative difference of gradients, by kind of weight, and of log-probs, in a wider dtype."""
        wide = torch.float32 if self.model.dtype == torch.bfloat16 else torch.float64
        copy = attach(cut_copy(self.model, SLICE_LAYERS, wide))
        microbatch = self._pack(slice_groups(self.shape.vocab_size))
        alone = read_result(copy, microbatch.backward(copy))
        copy.zero_grad(set_to_none=True)
        logprobs_M = microbatch.backward(set_sequence_parallel(copy, self.group))
        self.ranks.all_reduce_gradients(copy.parameters())
        return max(self._largest(read_result(copy, logprobs_M).gaps_from(alone)).values())

    def _time(self, microbatch: Microbatch, num_steps: int, *, is_shared: bool) -> _Way:
        """Leaves the last step's gradients. Alone, the fastest rank decides; together, the slowest."""
        set_sequence_parallel(self.model, self.group if is_shared else None)
        sum_s: list[float] = []

        def sum_gradients() -> None:
            self.ranks.all_reduce_gradients(self.model.parameters())

        def step() -> float:
            self.model.zero_grad(set_to_none=True)
            self.ranks.barrier()
            step_s = seconds_of(lambda: microbatch.backward(self.model), self.device)
            if is_shared:
                sum_s.append(seconds_of(sum_gradients, self.device))
                step_s += sum_s[-1]
            return step_s

        started = time.perf_counter()
        step()
        first_call_s = time.perf_counter() - started
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        samples = [step() for _ in range(num_steps)]
        sign = 1.0 if is_shared else -1.0
        decided = self.ranks.all_reduce_maxima({f"{n:04}": sign * sample for n, sample in enumerate(samples)})
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None
        return _Way(
            steps=Steps(samples_s=tuple(sign * value for value in decided.values())),
            first_call_s=first_call_s,
            peak_gib=peak,
            figures={"gradient_sum_s": min(sum_s)} if is_shared else {},
        )

    def _gaps(self, expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """By parameter: norm of the difference over the norm, the largest of all ranks."""
        gaps: dict[str, float] = {}
        for name, grad in _gradients(self.model).items():
            wanted = expected[name].to(grad.device, torch.float32)
            gap = float((grad.float() - wanted).norm() / wanted.norm())
            gaps[name] = gap if math.isfinite(gap) else math.inf
        return self._largest(gaps)

    def _largest(self, gaps: Mapping[str, float]) -> dict[str, float]:
        """So that all ranks judge alike, and none waits for one that gave up."""
        return self.ranks.all_reduce_maxima(gaps)

    def _row(self, way: _Way, degree: int, more: Mapping[str, float]) -> BenchRow:
        is_gpu = self.device.type == "cuda"
        step_s = way.steps.median_s
        figures: dict[str, float | int | str | bool | None] = {
            "case_name": self.case.name,
            "sequence_parallel": degree,
            "num_rows": self.case.num_rows,
            "recompute": Variant.named(_VARIANT).recompute,
            "compile": False,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "step_s": step_s,
            "step_min_s": min(way.steps.samples_s),
            "step_max_s": max(way.steps.samples_s),
            "repeats": len(way.steps.samples_s),
            "first_call_s": way.first_call_s,
            "useful_tflops_per_s_a_rank": self.flops / step_s / 1e12 / degree,
            "peak_gib": way.peak_gib,
            "kernels": kernels_of(Variant.named(_VARIANT), self.model, self.case.num_rows),
            "timing": (
                "forward, loss and backward; together also the sum of gradients over ranks; each step by its slowest "
                "rank together, by its fastest alone (all ranks at the same time)"
            ),
            **more,
        }
        peak = peak_tflops(device_name()) if is_gpu else None
        if peak is not None:
            figures["useful_mfu"] = self.flops / step_s / 1e12 / degree / peak
        return BenchRow(
            bench="sequence-parallel",
            case=self.case.key,
            impl="auto",
            layout="shared",
            peer=False,
            figures=figures,
            command=self.command,
        )


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _refuse_over(gap: float, allowed: float, where: str) -> None:
    if not gap <= allowed:
        raise WrongResultError(f"{where}, gradients of ranks together are out by {gap:.3g} (allowed {allowed:.3g})")


def _say_nothing(_: str) -> None:
    pass
