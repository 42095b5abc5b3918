"""A group too large for one microbatch, its prompt computed once, against what its work predicts from one that fits.

Three ways of the same model, under the same settings:

- `fits`: a group of as many responses as one microbatch holds. Its useful FLOPs a second are the pace.
- `kept`: the large group in microbatches of so many responses, its prompt kept from one to the next. Its own useful
  FLOPs at that pace are what it should take.
- `repeated`: the same microbatches, each with the prompt before its responses.

Before any time is reported, `kept` is held equal twice:

- On a slice (the model's first layers in a wider dtype, a short group of odd lengths) to the whole group in one pass
  and to `repeated`, nearly to the last digit.
- At full size to `repeated`. Rows then meet other matrix products, whose rounding grows through the layers in bf16: the
  bound is that of two right ways of an update, and finds what breaks at size.
"""

# Shape letters: P prompt tokens, R response tokens, N responses, M scored tokens.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.bench import choosing
from ratoon.bench.outcome import Outcome, WrongResultError, free_memory
from ratoon.bench.policy_update import cases as update_cases
from ratoon.bench.policy_update.cases import Decoder, make_group
from ratoon.bench.policy_update.check import (
    LOGPROBS,
    SLICE_LAYERS,
    Result,
    check_full_size,
    read_result,
    run_update,
)
from ratoon.bench.policy_update.microbatches import Microbatch, SharedPack, kernels_of, with_advantages
from ratoon.bench.policy_update.random_model import build_model, cut_copy
from ratoon.bench.policy_update.timing import seconds_of
from ratoon.bench.policy_update.variants import Variant
from ratoon.bench.rows import BenchRow, append_rows, device_name
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import KeptPrompt, attach, forward_logprobs, model_shape, set_compile, set_recompute
from ratoon.planner import CostModel, GroupShape, peak_tflops, plan_shapes, useful_flops
from ratoon.types import RolloutGroup

Way = Literal["fits", "kept", "repeated"]

SLICE_GAP = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative, of log-probs and gradients of the slice. Sums in another order change those in float32 by 1e-6, and in
float64 by 2e-8, because the layers' norms are float32 in either; a gradient that does not reach the prompt, or reaches
it twice, by a tenth to 1."""

_SLICE_PROMPT, _SLICE_LENGTHS = 61, (23, 1, 38, 45, 9)
_SLICE_PARTS = ((0, 1), (2,), (3, 4))
"""In the group's order, so that log-probs of the whole stand alike."""

_SEED = 0
_MAX_STEPS = 12
_LABEL_WIDTH = 12
_GPU_TIMING = (
    "CUDA events around each step, gradients freed before it; packing for the device is inside; the best counts"
)
_CPU_TIMING = "wall clock of each step; the best counts"


@dataclass(frozen=True, kw_only=True)
class PrefixCase:
    """One group of N responses of R tokens to one prompt of P, of which `fits` responses fit a microbatch."""

    name: str
    decoder: Decoder
    P: int
    R: int
    N: int
    fits: int
    variant: str
    """Of policy-update's: what is computed again, and what is compiled."""

    needs_gpu: bool = True

    @cached_property
    def group(self) -> RolloutGroup:
        return make_group(self.decoder.vocab_size, self.P, [self.R] * self.N, _SEED)

    @property
    def max_rows(self) -> int:
        """Of a microbatch."""
        return self.P + self.fits * self.R

    def key(self, way: Way) -> dict[str, Any]:
        """The `case` of a result row."""
        N = self.fits if way == "fits" else self.N
        return {"model": self.decoder.name, "P": self.P, "R": self.R, "N": N, "groups": 1}


_CASES = (
    PrefixCase(
        # 8: with nothing computed again, 49,152 rows take about 100 of the GPU's 139 GiB, and 64 is eight times that.
        name="1.7b-p16384-r4096-n64", decoder=update_cases.CASES["1.7b-p8192-r512-n16"].decoder,
        P=16_384, R=4096, N=64, fits=8, variant="auto/none/layers",
    ),
    PrefixCase(
        name="tiny", decoder=update_cases.CASES["tiny"].decoder,
        P=57, R=19, N=7, fits=3, variant="auto/none/none", needs_gpu=False,
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def bench_prefix_once(
    *,
    cases: Sequence[str] | None = None,
    budget_s: float,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Checks and times each case in its three ways.

    cases: names; None takes the usual ones of the machine.
    budget_s: about how long the steps of one way are timed; at least two, of `repeated` at least one.
    Raises UserError for a name that does not exist, before anything runs.
    """
    has_gpu = torch.cuda.is_available()
    names = cases or [case.name for case in CASES.values() if case.needs_gpu == has_gpu]
    chosen = choosing.choose_cases(names, CASES, "large group", has_gpu=has_gpu)
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    outcome = Outcome()
    for case in chosen:
        with outcome.noting(case.name, "kept", say, is_ours=True, width=_LABEL_WIDTH):
            rows = _CaseRun(case=case, device=device, command=command).measure(budget_s, say)
            outcome.rows.extend(rows)
            if results is not None:
                append_rows(results, rows)
        torch.compiler.reset()
        free_memory()  # raises where an error has broken the device for all that would follow
    return outcome


@dataclass(frozen=True, kw_only=True)
class KeptPack:
    """Responses whose prompt was computed before."""

    layout: PackedLayout
    kept: KeptPrompt

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows - self.kept.num_rows

    def score(self, model: PreTrainedModel) -> Tensor:
        return forward_logprobs(model, self.layout, kept=self.kept)[0]


def backward_kept(model: PreTrainedModel, group: RolloutGroup, microbatches: Sequence[Microbatch]) -> list[Tensor]:
    """The update of `microbatches`, which are shared packs of the group, with the prompt in a pass of its own.

    Gradients add up in the parameters. Returns the log-probs of each microbatch.
    """
    kept = KeptPrompt.keep(model, group.prompt.token_ids)
    logprobs: list[Tensor] = []
    for microbatch in microbatches:
        assert isinstance(microbatch.pack, SharedPack), "what is packed holds prompt and responses"
        responses = replace(microbatch, pack=KeptPack(layout=microbatch.pack.layout, kept=kept))
        logprobs.append(responses.backward(model))
        kept.add_gradients()
    kept.backward()
    return logprobs


def slice_gaps(model: PreTrainedModel) -> dict[str, float]:
    """Largest relative differences of `kept` from the group in one pass and from `repeated`, of a slice of the model.

    Raises WrongResultError where they are over `SLICE_GAP`.
    """
    wide = torch.float32 if model.dtype == torch.bfloat16 else torch.float64
    copy = attach(cut_copy(model, SLICE_LAYERS, wide))
    group = make_group(model_shape(model.config).vocab_size, _SLICE_PROMPT, _SLICE_LENGTHS, 1)
    parts = _pack(group, _SLICE_PARTS, model.device)
    whole = run_update(copy, _pack(group, [range(group.group_size)], model.device))
    repeated = run_update(copy, parts)
    logprobs_M = torch.cat(backward_kept(copy, group, parts))
    kept = read_result(copy, logprobs_M)
    found: dict[str, float] = {}
    for name, other in (("one pass", whole), ("its prompt repeated", repeated)):
        for kind, gap in kept.gaps_from(other).items():
            if not gap <= SLICE_GAP[wide]:
                raise WrongResultError(f"on a slice, {kind} out by {gap:.3g} of {name} (allowed {SLICE_GAP[wide]:.0e})")
            figure = "slice_logprob_gap" if kind == LOGPROBS else "slice_gradient_gap"
            found[figure] = max(gap, found.get(figure, 0.0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Steps of one way."""

    way: Way
    flops: float
    """Useful ones of a step."""

    num_microbatches: int
    num_rows: int
    """Computed in a step."""

    first_call_s: float
    """Of a part of the update that has all its shapes, before the steps; compilation and first use of memory."""

    samples_s: tuple[float, ...]
    peak_gib: float | None

    @property
    def best_s(self) -> float:
        return min(self.samples_s)

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.best_s


class _CaseRun:
    """One case's model and microbatches."""

    def __init__(self, *, case: PrefixCase, device: torch.device, command: str) -> None:
        self.case, self.device, self.command = case, device, command
        self.model = build_model(case.decoder, device)
        self.shape = model_shape(self.model.config)
        self.variant = Variant.named(case.variant)
        fitting = case.group.select(range(case.fits))
        self.fitting = _pack(fitting, [range(case.fits)], device)
        self.parts = _pack(case.group, planned_parts(case), device)
        self.fitting_flops, self.flops = (
            useful_flops(self.shape, pack_groups([group])) for group in (fitting, case.group)
        )

    def measure(self, budget_s: float, say: Callable[[str], None]) -> list[BenchRow]:
        """Raises WrongResultError, and reports no time, where a check is red."""
        case = self.case
        say(
            f"{case.name}: {case.decoder.name}, P {case.P:,}, R {case.R:,}, N {case.N} in {len(self.parts)} "
            f"microbatches of at most {case.max_rows:,} rows, useful work {self.flops / 1e12:.4g} TFLOP"
        )
        gaps = slice_gaps(self.model)
        set_compile(set_recompute(self.model, self.variant.recompute), self.variant.compile)
        fits, _ = self._time("fits", budget_s)
        kept, result = self._time("kept", budget_s)
        repeated, wanted = self._time("repeated", budget_s, min_steps=1)
        gaps["full_size_gradient_gap"] = check_full_size(result, wanted)
        predicted_s = self.flops / fits.flops_per_s
        more = {
            "predicted_s": predicted_s,
            "time_over_predicted": kept.best_s / predicted_s,
            "repeated_step_s": repeated.best_s,
            "repeated_over_kept": repeated.best_s / kept.best_s,
            **gaps,
        }
        for timed in (fits, kept, repeated):
            say(_line(timed))
        say(
            f"  kept takes {more['time_over_predicted']:.3f} times the {predicted_s:.4g} s predicted, and repeated "
            f"{more['repeated_over_kept']:.3f} times as long as kept; gradients out by "
            f"{gaps['slice_gradient_gap']:.2g} on a slice, {gaps['full_size_gradient_gap']:.2g} at full size"
        )
        return [self._row(fits, {}), self._row(kept, more), self._row(repeated, {})]

    def _update(self, way: Way, *, is_warm_up: bool = False) -> list[Tensor]:
        """Log-probs of each microbatch. A warm-up has one microbatch of each size."""
        microbatches = self.fitting if way == "fits" else self.parts
        if is_warm_up:
            microbatches = _one_of_each_size(microbatches)
        if way == "kept":
            return backward_kept(self.model, self.case.group, microbatches)
        return [microbatch.backward(self.model) for microbatch in microbatches]

    def _time(self, way: Way, budget_s: float, *, min_steps: int = 2) -> tuple[_Timed, Result]:
        """And what the last step came to."""
        is_gpu = self.device.type == "cuda"
        free_memory()  # blocks of another way's sizes would stand in the way of this one's
        first_call_s = seconds_of(lambda: self._update(way, is_warm_up=True), self.device)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        samples_s: list[float] = []
        logprobs: list[Tensor] = []

        def step() -> None:
            logprobs[:] = self._update(way)

        while len(samples_s) < min_steps or (len(samples_s) < _MAX_STEPS and sum(samples_s) < budget_s):
            self.model.zero_grad(set_to_none=True)
            samples_s.append(seconds_of(step, self.device))
        peak_gib = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_gpu else None
        result = read_result(self.model, torch.cat(logprobs))
        self.model.zero_grad(set_to_none=True)
        microbatches = self.fitting if way == "fits" else self.parts
        rows_saved = (len(microbatches) - 1) * self.case.P if way == "kept" else 0
        timed = _Timed(
            way=way,
            flops=self.fitting_flops if way == "fits" else self.flops,
            num_microbatches=len(microbatches),
            num_rows=sum(microbatch.pack.num_rows for microbatch in microbatches) - rows_saved,
            first_call_s=first_call_s,
            samples_s=tuple(samples_s),
            peak_gib=peak_gib,
        )
        return timed, result

    def _row(self, timed: _Timed, more: dict[str, float]) -> BenchRow:
        N = self.case.fits if timed.way == "fits" else self.case.N
        figures: dict[str, float | int | str | bool | None] = {
            "case_name": self.case.name,
            "way": timed.way,
            "variant": self.variant.name,
            "recompute": self.variant.recompute,
            "compile": self.variant.compile != "none",
            "kernels": kernels_of(self.variant, self.model, self.case.max_rows),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "microbatches": timed.num_microbatches,
            "max_rows": self.case.max_rows,
            "step_s": timed.best_s,
            "step_max_s": max(timed.samples_s),
            "repeats": len(timed.samples_s),
            "first_call_s": timed.first_call_s,
            "useful_tflops_per_s": timed.flops_per_s / 1e12,
            "computed_tokens_per_s": timed.num_rows / timed.best_s,
            "dedup_ratio": N * (self.case.P + self.case.R) / timed.num_rows,
            "peak_gib": timed.peak_gib,
            **more,
            "timing": _GPU_TIMING if self.device.type == "cuda" else _CPU_TIMING,
        }
        peak = peak_tflops(device_name()) if self.device.type == "cuda" else None
        if peak is not None:
            figures["useful_mfu"] = timed.flops_per_s / 1e12 / peak
        return BenchRow(
            bench="prefix-once",
            case=self.case.key(timed.way),
            impl=self.variant.impl,
            layout="shared",
            peer=False,
            figures=figures,
            command=self.command,
        )


def planned_parts(case: PrefixCase) -> list[tuple[int, ...]]:
    """Responses of each microbatch, as the planner cuts the group."""
    # Without the cost of a pass: whether a kept prompt pays is measured here.
    plan = plan_shapes(
        [GroupShape.of(case.group)],
        max_rows_per_microbatch=case.max_rows,
        cost=CostModel(seconds_per_microbatch=0.0),
        keeps_prompts=True,
    )
    assert plan.kept_runs == (((0, plan.num_microbatches),),), f"one run of all microbatches, got {plan.kept_runs}"
    return [responses for ((_, responses),) in plan.assignment[0]]


def _pack(group: RolloutGroup, parts: Sequence[Sequence[int]], device: torch.device) -> list[Microbatch]:
    """A microbatch for each part of the responses, with the prompt."""
    groups = [group.select(responses) for responses in parts]
    return with_advantages([([part], SharedPack(layout=pack_groups([part]))) for part in groups], device)


def _one_of_each_size(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    return list({microbatch.pack.num_rows: microbatch for microbatch in microbatches}.values())


def _line(timed: _Timed) -> str:
    return (
        f"  {timed.way:<{_LABEL_WIDTH}}{timed.best_s:.4g} s "
        f"(to {max(timed.samples_s):.4g}, {len(timed.samples_s)} steps), {timed.flops_per_s / 1e12:.4g} useful TFLOP/s"
        + ("" if timed.peak_gib is None else f", {timed.peak_gib:.1f} GiB")
    )
