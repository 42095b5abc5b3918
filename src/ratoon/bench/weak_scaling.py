"""A model on each GPU by itself, and cut over all of them: the same update on every rank, timed both ways.

Alone, every rank does its own group's update at the same time as the others, without a word between them. Sharded, it
does the same work while weights are gathered and gradients are summed over ranks. Weak-scaling efficiency is the one
time over the other. Gradients are held equal twice:

- On a slice (the model's first layers in float32, short groups of odd lengths) nearly to the last digit.
- At full size, of the last timed step: the first and the last layer, and all that is outside of layers, against the
  float32 sum over ranks of what each had alone.
"""

# Shape letters: P prompt tokens, R response tokens, N responses of a group.

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ratoon.bench import choosing
from ratoon.bench.outcome import Outcome, Unmeasured, WrongResultError, free_memory
from ratoon.bench.policy_update import cases as update_cases
from ratoon.bench.policy_update.cases import UpdateCase, make_group
from ratoon.bench.policy_update.check import FULL_SIZE_GAP, SLICE_LAYERS
from ratoon.bench.policy_update.microbatches import Microbatch, Pack, kernels_of, pack_update
from ratoon.bench.policy_update.random_model import build_model, cut_copy, decoder_config
from ratoon.bench.policy_update.timing import Steps, seconds_of
from ratoon.bench.policy_update.variants import OUR_VARIANTS, Variant
from ratoon.bench.rows import BenchRow, append_rows, device_name
from ratoon.bench.sequence_parallel import NEARLY_EQUAL_SUMS
from ratoon.distributed import DataParallel, run_in_root, shard_mesh, shard_model
from ratoon.layout import pack_groups
from ratoon.models import attach, model_shape, set_compile, set_recompute
from ratoon.models.sharding import decoder_layers
from ratoon.planner import peak_tflops, useful_flops
from ratoon.types import RolloutGroup

SLICE_GAP = 1e-3
"""Relative, of gradients of the slice. Sums in another order change those in float32 by 1e-6; a rank that is left out,
a mean in place of a sum, and weights of another layer change them by about 1."""

CASES = {case.name: case for case in update_cases.CASES.values() if not case.decoder.num_experts}
_DEFAULT_CASE = {True: "8b-p8192-r1024-n16", False: "tiny"}
"""By whether there is a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a sharded update is done."""

    variant: Variant

    reshard: bool
    """Gathered layers are dropped after their forward pass and gathered again for backward."""

    prefetch: int
    """Layers being gathered ahead of the one that computes."""

    @property
    def name(self) -> str:
        """`RECOMPUTE/COMPILE/reshard|keep/PREFETCH`."""
        kept = "reshard" if self.reshard else "keep"
        return f"{self.variant.recompute}/{self.variant.compile}/{kept}/{self.prefetch}"


_WAYS = [
    Way(variant=Variant.named(variant), reshard=reshard, prefetch=prefetch)
    for variant in OUR_VARIANTS
    for reshard in (True, False)
    for prefetch in (1, 2)
]
WAYS = {way.name: way for way in _WAYS}
_DEFAULT_WAY = {True: "selective/layers/reshard/1", False: "selective/none/reshard/1"}
"""By whether there is a GPU; on a CPU compiling takes longer than all else."""


def bench_weak_scaling(
    ranks: DataParallel,
    *,
    cases: Sequence[str] | None = None,
    ways: Sequence[str] | None = None,
    num_steps: int,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
    compile_backend: str = "inductor",
) -> Outcome:
    """Checks and times each case in each way. All ranks must call it; the first one says and writes what is found.

    cases, ways: names; None takes the usual one of the machine. num_steps: timed, after one that is not.
    Raises UserError for a name that does not exist, before anything runs.
    """
    has_gpu = torch.cuda.is_available()
    chosen = choosing.choose_cases(cases or [_DEFAULT_CASE[has_gpu]], CASES, "update", has_gpu=has_gpu)
    names = choosing.choose_names(ways, tuple(WAYS), (_DEFAULT_WAY[has_gpu],), "way")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    say = say if ranks.is_main else _say_nothing
    outcome = Outcome()
    with _process_group(ranks, device):
        for case in chosen:
            run = _ScalingRun(case=case, ranks=ranks, device=device, command=command, compile_backend=compile_backend)
            say(f"{case.name}: {case.decoder.name}, {run.num_rows:,} rows a rank, {ranks.world_size} ranks")
            for name in names:
                try:
                    row = run.measure(WAYS[name], num_steps, say)
                except WrongResultError as error:  # all ranks judge alike; any other error ends the run, on all of them
                    say(f"  {name}: WRONG, no speed is reported: {error}")
                    outcome.failed.append(Unmeasured(case_name=case.name, name=name, reason=str(error)))
                else:
                    outcome.rows.append(row)
                    if results is not None and ranks.is_main:
                        append_rows(results, [row])
                torch.compiler.reset()
                free_memory()
    return outcome


@dataclass(frozen=True, kw_only=True)
class _InRoot:
    """A pack that is scored inside of a sharded model."""

    pack: Pack

    @property
    def num_rows(self) -> int:
        return self.pack.num_rows

    def score(self, model: PreTrainedModel) -> Tensor:
        return run_in_root(model, lambda: self.pack.score(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Steps of all ranks."""

    samples_s: list[list[float]]
    """[rank][step]."""

    first_call_s: float

    peak_gib: float | None
    """Of the timed steps, on the rank that needed most."""

    num_graphs: int
    """Compiled during the timed steps."""

    def steps(self, of_ranks: Callable[[Sequence[float]], float]) -> Steps:
        """Each step by `of_ranks` of its ranks' times."""
        return Steps(samples_s=tuple(of_ranks(step) for step in zip(*self.samples_s, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """What ranks by themselves came to."""

    timed: _Timed

    grads: dict[str, Tensor]
    """Sums over ranks, on the host: the peak of the other way is to be its own."""


class _ScalingRun:
    """One case: the group of this rank, and what ranks by themselves came to under each variant."""

    def __init__(
        self, *, case: UpdateCase, ranks: DataParallel, device: torch.device, command: str, compile_backend: str
    ) -> None:
        self.case, self.ranks, self.device, self.command = case, ranks, device, command
        self.compile_backend = compile_backend
        self.shape = model_shape(decoder_config(case.decoder))
        self.groups = (make_group(self.shape.vocab_size, case.P, [case.R] * case.N, seed=ranks.rank),)
        self.num_rows = case.P + case.N * case.R
        self.flops = useful_flops(self.shape, pack_groups(self.groups))
        self.alone: dict[str, _Alone] = {}

    def measure(self, way: Way, num_steps: int, say: Callable[[str], None]) -> BenchRow:
        """Raises WrongResultError, on all ranks, where gradients differ."""
        model = build_model(self.case.decoder, self.device)
        self.ranks.broadcast_parameters(model.parameters())
        slice_gap = self._slice_gap(model, way)
        say(f"  {way.name}: gradients of a slice differ by {slice_gap:.2g}")
        _refuse_over(slice_gap, SLICE_GAP, "on a slice")
        free_memory()
        microbatch = self._pack(self.groups, way.variant)
        if way.variant.name not in self.alone:
            self.alone[way.variant.name] = self._run_alone(model, microbatch, way.variant, num_steps)
        alone = self.alone[way.variant.name]
        alone_s = alone.timed.steps(statistics.median).median_s
        say(f"  alone      {alone_s:.4g} s{_memory(alone.timed)}  first call {alone.timed.first_call_s:.3g} s")
        self._shard(self._set(model, way.variant), way)
        sharded = self._time(model, microbatch, num_steps)
        gaps = self._gaps(model, alone.grads)
        says_much = max(gap for name, gap in gaps.items() if not any(part in name for part in NEARLY_EQUAL_SUMS))
        _refuse_over(says_much, FULL_SIZE_GAP, "at full size")
        step_s = sharded.steps(max).median_s
        say(
            f"  sharded    {step_s:.4g} s{_memory(sharded)}  first call {sharded.first_call_s:.3g} s  "
            f"efficiency {alone_s / step_s:.3f}  gradients out by {says_much:.2g}"
        )
        checks = {
            "slice_gradient_gap": slice_gap,
            "gradient_gap": says_much,
            "gradient_gap_with_queries_and_keys": max(gaps.values()),
        }
        return self._row(way, alone.timed, sharded, checks, kernels_of(way.variant, model, self.num_rows))

    def _pack(self, groups: Sequence[RolloutGroup], variant: Variant) -> Microbatch:
        (microbatch,) = pack_update(groups, variant, len(groups), self.device)
        return in_root(microbatch)

    def _set(self, model: PreTrainedModel, variant: Variant) -> PreTrainedModel:
        return set_compile(set_recompute(model, variant.recompute), variant.compile, backend=self.compile_backend)

    def _shard(self, model: PreTrainedModel, way: Way) -> None:
        """The model goes on computing in the dtype that it has."""
        shard_model(
            model,
            shard_mesh(self.device.type),
            layers=decoder_layers(model),
            compute_dtype=model.dtype,
            reshard_after_forward=way.reshard,
            prefetch=way.prefetch,
        )

    def _slice_gap(self, model: PreTrainedModel, way: Way) -> float:
        """Largest relative difference of a weight's gradient, in a wider dtype, not compiled."""
        wide = torch.float32 if model.dtype == torch.bfloat16 else torch.float64
        copy = set_recompute(attach(cut_copy(model, SLICE_LAYERS, wide)), way.variant.recompute)
        microbatch = self._pack(_slice_groups(self.shape.vocab_size, self.ranks.rank), way.variant)
        microbatch.backward(copy)
        expected = _summed_gradients(copy, [name for name, _ in copy.named_parameters()])
        copy.zero_grad(set_to_none=True)
        self._shard(copy, way)
        microbatch.backward(copy)
        return max(self._gaps(copy, expected).values())

    def _run_alone(self, model: PreTrainedModel, microbatch: Microbatch, variant: Variant, num_steps: int) -> _Alone:
        """Leaves the model without gradients and not compiled."""
        timed = self._time(self._set(model, variant), microbatch, num_steps)
        grads = {name: grad.to("cpu") for name, grad in _summed_gradients(model, _compared(model)).items()}
        model.zero_grad(set_to_none=True)
        set_compile(model, "none")
        torch.compiler.reset()  # graphs know the class of a layer, which sharding changes
        free_memory()
        return _Alone(timed=timed, grads=grads)

    def _time(self, model: PreTrainedModel, microbatch: Microbatch, num_steps: int) -> _Timed:
        """Leaves the last step's gradients."""
        is_gpu = self.device.type == "cuda"

        def step() -> float:
            model.zero_grad(set_to_none=True)
            self.ranks.barrier()
            return seconds_of(lambda: microbatch.backward(model), self.device)

        started = time.perf_counter()
        step()
        first_call_s = time.perf_counter() - started
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        num_graphs = counters["stats"]["unique_graphs"]
        samples = [step() for _ in range(num_steps)]
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_gpu else 0.0
        return _Timed(
            samples_s=self.ranks.all_gather("times of steps", samples),
            first_call_s=first_call_s,
            peak_gib=self.ranks.all_reduce_maxima({"peak": peak})["peak"] if is_gpu else None,
            num_graphs=counters["stats"]["unique_graphs"] - num_graphs,
        )

    def _gaps(self, model: PreTrainedModel, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """By parameter: norm of the difference over the norm, the largest of all ranks, so that all judge alike."""
        gaps: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            if name not in expected:
                continue
            gaps[name] = math.inf
            if parameter.grad is not None:
                grad = whole(parameter.grad)
                wanted = expected[name].to(grad)
                gap = float((grad - wanted).norm() / wanted.norm())
                gaps[name] = gap if math.isfinite(gap) else math.inf
        assert gaps.keys() == expected.keys(), "sharding keeps the names of parameters"
        return self.ranks.all_reduce_maxima(gaps)

    def _row(self, way: Way, alone: _Timed, sharded: _Timed, checks: Mapping[str, float], kernels: str) -> BenchRow:
        steps, alone_steps = sharded.steps(max), alone.steps(statistics.median)
        step_s = steps.median_s
        figures: dict[str, float | int | str | bool | None] = {
            "case_name": self.case.name,
            "way": way.name,
            "num_rows": self.num_rows,
            "recompute": way.variant.recompute,
            "compile": way.variant.compile != "none",
            "reshard": way.reshard,
            "prefetch": way.prefetch,
            "dtype": "bfloat16" if self.device.type == "cuda" else "float32",
            "step_s": step_s,
            "step_min_s": min(steps.samples_s),
            "step_max_s": max(steps.samples_s),
            "alone_step_s": alone_steps.median_s,
            "alone_step_min_s": min(alone_steps.samples_s),
            "alone_step_max_s": max(alone_steps.samples_s),
            "repeats": len(steps.samples_s),
            "efficiency": alone_steps.median_s / step_s,
            "first_call_s": sharded.first_call_s,
            "alone_first_call_s": alone.first_call_s,
            "graphs_compiled_while_timed": alone.num_graphs + sharded.num_graphs,
            "useful_tflops_per_s_a_rank": self.flops / step_s / 1e12,
            "peak_gib": sharded.peak_gib,
            "alone_peak_gib": alone.peak_gib,
            "kernels": kernels,
            "timing": (
                "forward, loss and backward of each rank's own group; sharded, weights are gathered and float32 "
                "gradients summed over ranks inside, each step by its slowest rank; alone, each step by the median of "
                "ranks, all at the same time"
            ),
            **checks,
        }
        peak = peak_tflops(device_name()) if self.device.type == "cuda" else None
        if peak is not None:
            figures["useful_mfu"] = self.flops / step_s / 1e12 / peak
        return BenchRow(
            bench="weak-scaling",
            case={**self.case.key, "gpus": self.ranks.world_size},
            impl="auto",
            layout="shared",
            peer=False,
            figures=figures,
            command=self.command,
        )


def in_root(microbatch: Microbatch) -> Microbatch:
    """The same work, for a model that may be sharded."""
    return replace(microbatch, pack=_InRoot(pack=microbatch.pack))


def whole(grad: Tensor) -> Tensor:
    """Of all ranks' parts, which must all call it; a gradient that is not cut is returned as it is."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@contextmanager
def _process_group(ranks: DataParallel, device: torch.device) -> Iterator[None]:
    """A rank by itself has none, and sharding asks for one."""
    if ranks.world_size > 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _slice_groups(vocab_size: int, rank: int) -> tuple[RolloutGroup, ...]:
    """Two prompts of odd lengths, five responses; other tokens on each rank."""
    shapes: tuple[tuple[int, list[int]], ...] = ((61, [23, 1, 38]), (19, [45, 9]))
    return tuple(make_group(vocab_size, P, R, seed=2 * rank + n) for n, (P, R) in enumerate(shapes, start=1))


def _compared(model: PreTrainedModel) -> list[str]:
    """Names of the parameters of the first and the last layer, and of those outside of layers."""
    layers = decoder_layers(model)
    between = {parameter for layer in layers[1:-1] for parameter in layer.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter not in between]


@torch.no_grad()
def _summed_gradients(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Over ranks, in float32 at least."""
    found: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for name in names:
        grad = parameters[name].grad
        assert grad is not None, f"{name} has no gradient after a backward pass"
        # A tensor of its own: the gradient is as this rank had it.
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        dist.all_reduce(total)
        found[name] = total
    return found


def _refuse_over(gap: float, allowed: float, where: str) -> None:
    if not gap <= allowed:
        raise WrongResultError(f"{where}, gradients of the cut model are out by {gap:.3g} (allowed {allowed:.3g})")


def _memory(timed: _Timed) -> str:
    return "" if timed.peak_gib is None else f"  {timed.peak_gib:.1f} GiB"


def _say_nothing(_: str) -> None:
    pass
