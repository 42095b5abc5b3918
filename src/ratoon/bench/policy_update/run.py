"""Every case with every variant: made, checked, timed, and written down before the next begins."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.bench.choosing import choose_names
from ratoon.bench.outcome import Outcome, free_memory
from ratoon.bench.policy_update.cases import UpdateCase, choose_cases
from ratoon.bench.policy_update.check import (
    LOGPROBS,
    SLICE_SEQUENCES,
    Result,
    Slice,
    check_full_size,
    read_result,
    run_update,
)
from ratoon.bench.policy_update.microbatches import Microbatch, alone_groups, attending, kernels_of, pack_update
from ratoon.bench.policy_update.random_model import build_model
from ratoon.bench.policy_update.tables import LABEL_WIDTH, case_line, measured_line
from ratoon.bench.policy_update.timing import (
    Steps,
    gpu_idle_fraction,
    optimizer_seconds,
    seconds_of,
    time_steps,
)
from ratoon.bench.policy_update.variants import OUR_VARIANTS, PEER_VARIANTS, Variant
from ratoon.bench.rows import BenchRow, append_rows, device_name
from ratoon.layout import pack_groups
from ratoon.models import model_shape, set_compile, set_recompute
from ratoon.planner import peak_tflops, useful_flops
from ratoon.types import RolloutGroup, UserError

_REFERENCE = "auto/full/none"
"""Of ours; what gradients at full size are compared with."""

_PEAK_TFLOPS = 989.0
"""What `useful_mfu` is of: dense bf16 of H100 and H200."""

_LOGPROBS = "of scored tokens only, by linear_logprob"
_GPU_TIMING = "CUDA events around each step, gradients freed before it; packing for the device is inside for ours"
_CPU_TIMING = "wall clock of each step"


def bench_updates(
    *,
    cases: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    budget_s: float,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Checks and times the update of each case under each variant.

    cases, impls, peers: names; None takes what the case has by default (on a CPU no peers, all of which need a GPU),
    ["none"] no variant of ours or no peer.
    budget_s: about how long the steps of one variant are timed; two steps at least.
    results: each row is appended as soon as it is measured, so that a run that is killed keeps what it has.
    Raises UserError for a name that does not exist, before anything runs.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    is_gpu = device.type == "cuda"
    chosen = choose_cases(cases, has_gpu=is_gpu)
    choose_names(impls, OUR_VARIANTS, (), "variant")  # a wrong name is found before anything is measured
    choose_names(peers, PEER_VARIANTS, (), "peer")
    outcome = Outcome()
    for case in chosen:
        names = choose_names(impls, OUR_VARIANTS, case.ours, "variant")
        names += choose_names(peers, PEER_VARIANTS, case.peers if is_gpu else (), "peer")
        with outcome.noting(case.name, case.name, say, is_ours=True, refusals=(UserError,), width=LABEL_WIDTH):
            run = _CaseRun(case=case, device=device, budget_s=budget_s, command=command)
            say(case_line(case, run.model, run.flops))
            run.make_reference(outcome, say)
            for name in names:
                variant = Variant.named(name)
                label = f"{name} (peer)" if variant.is_peer else name
                with outcome.noting(case.name, label, say, is_ours=not variant.is_peer, width=LABEL_WIDTH):
                    row = run.measure(variant)
                    outcome.rows.append(row)
                    if results is not None:
                        append_rows(results, [row])
                    say(measured_line(row))
                run.clear()
            del run
        free_memory()  # raises where an error has broken the device for all that would follow
    return outcome


class _CaseRun:
    """One case's model and the answers that all variants are held to."""

    def __init__(self, *, case: UpdateCase, device: torch.device, budget_s: float, command: str) -> None:
        self.case, self.device, self.budget_s, self.command = case, device, budget_s, command
        self.model: PreTrainedModel = build_model(case.decoder, device, lora_rank=case.lora_rank)
        self.layout = pack_groups(case.groups)
        shape = model_shape(self.model.config)
        trains_weights = case.lora_rank == 0
        self.flops = useful_flops(shape, self.layout, trains_weights=trains_weights)
        alone = pack_groups(alone_groups(case.groups))
        self.flop_ratio = useful_flops(shape, alone, trains_weights=trains_weights) / self.flops
        self.slice = Slice.of(self.model)
        self.reference: Result | None = None

    def make_reference(self, outcome: Outcome, say: Callable[[str], None]) -> None:
        """Ours at full size; without it (the memory may not suffice) nothing is compared at full size."""
        variant = Variant.named(_REFERENCE)
        label = f"{_REFERENCE}, what others are compared with"
        with outcome.noting(self.case.name, label, say, is_ours=True, width=LABEL_WIDTH):
            self._set(variant)
            self.reference = run_update(self.model, self._pack(variant, self.case.groups))
        self.clear()

    def measure(self, variant: Variant) -> BenchRow:
        """Raises WrongResultError, and reports no time, where a check is red."""
        self._set(variant)
        microbatches = self._pack(variant, self.case.groups)
        with attending(self.model, variant):
            # At full size first, so that the compiler chooses for it. A variant's microbatches are alike.
            started = time.perf_counter()
            seconds_of(lambda: microbatches[0].backward(self.model), self.device)
            first_call_s = time.perf_counter() - started
            slice_gaps = self.slice.check(self.model, self._pack(variant, self.slice.groups, SLICE_SEQUENCES))
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            first_s, full_size_gap = self._checked_step(microbatches)
            steps = time_steps(first_s, lambda: self._step(microbatches)[0], self.budget_s)
            is_gpu = self.device.type == "cuda"
            idle = gpu_idle_fraction(lambda: self._step(microbatches)) if is_gpu else None
            peak_gib = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_gpu else None
        free_memory()  # blocks in the sizes of activations
        gaps = {
            "slice_logprob_gap": slice_gaps[LOGPROBS],
            "slice_gradient_gap": max(gap for kind, gap in slice_gaps.items() if kind != LOGPROBS),
            "full_size_gradient_gap": full_size_gap,
        }
        more = {
            "peak_gib": peak_gib,
            "first_call_s": first_call_s,
            "gpu_idle_fraction": idle,
            "optimizer_s": optimizer_seconds(self.model, self.device),
            **gaps,
        }
        return self._row(variant, microbatches, steps, more)

    def clear(self) -> None:
        """Frees what a variant left, compiled code too."""
        self.model.zero_grad(set_to_none=True)
        set_compile(self.model, "none")
        torch.compiler.reset()
        free_memory()

    def _set(self, variant: Variant) -> None:
        set_compile(set_recompute(self.model, variant.recompute), variant.compile)

    def _pack(self, variant: Variant, groups: Sequence[RolloutGroup], sequences: int | None = None) -> list[Microbatch]:
        sequences = sequences or variant.sequences or self.case.sequences_of_peers
        return pack_update(groups, variant, sequences, self.device)

    def _step(self, microbatches: Sequence[Microbatch]) -> tuple[float, list[Tensor]]:
        """Seconds of a whole step, and its log-probs."""
        self.model.zero_grad(set_to_none=True)
        logprobs: list[Tensor] = []
        step_s = seconds_of(
            lambda: logprobs.extend(microbatch.backward(self.model) for microbatch in microbatches), self.device
        )
        return step_s, logprobs

    def _checked_step(self, microbatches: Sequence[Microbatch]) -> tuple[float, float | None]:
        """Seconds of a whole step, and how far its gradients are from those of ours."""
        step_s, logprobs = self._step(microbatches)
        if self.reference is None:
            return step_s, None
        return step_s, check_full_size(read_result(self.model, torch.cat(logprobs)), self.reference)

    def _row(
        self, variant: Variant, microbatches: Sequence[Microbatch], steps: Steps, more: dict[str, float | None]
    ) -> BenchRow:
        is_gpu = self.device.type == "cuda"
        step_s = steps.median_s
        num_rows = sum(microbatch.pack.num_rows for microbatch in microbatches)
        figures: dict[str, float | int | str | bool | None] = {
            "case_name": self.case.name,
            "variant": variant.name,
            "recompute": variant.recompute,
            "compile": variant.compile != "none",
            "microbatches": len(microbatches),
            "kernels": kernels_of(variant, self.model, microbatches[0].pack.num_rows),
            "logprobs": _LOGPROBS,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "step_s": step_s,
            "step_min_s": min(steps.samples_s),
            "step_max_s": max(steps.samples_s),
            "repeats": len(steps.samples_s),
            "useful_tflops_per_s": self.flops / step_s / 1e12,
            "computed_tokens_per_s": num_rows / step_s,
            "logical_tokens_per_s": self.layout.num_logical_tokens / step_s,
            "dedup_ratio": self.layout.dedup_ratio,
            "flop_ratio": self.flop_ratio,
            **more,
            "timing": _GPU_TIMING if is_gpu else _CPU_TIMING,
        }
        if is_gpu and peak_tflops(device_name()) == _PEAK_TFLOPS:
            figures["useful_mfu"] = self.flops / step_s / 1e12 / _PEAK_TFLOPS
        return BenchRow(
            bench="policy-update",
            case=self.case.key,
            impl=variant.impl,
            layout=variant.layout,
            peer=variant.is_peer,
            figures=figures,
            command=self.command,
        )
