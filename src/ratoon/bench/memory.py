"""What an update is predicted to take of a GPU's memory, and what its allocator gives out.

One group of N responses to one prompt, an update of random weights in bfloat16, AdamW with float32 masters. The second
backward is measured, in which the gradients of an earlier microbatch wait. Nothing is timed.
"""

# Shape letters: P prompt tokens, R response tokens, N responses of a group, M scored tokens.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ratoon.bench import choosing
from ratoon.bench.outcome import Outcome, Unmeasured, free_memory
from ratoon.bench.policy_update import cases as update_cases
from ratoon.bench.policy_update.cases import Decoder, make_group
from ratoon.bench.policy_update.random_model import decoder_config, smollm2_config
from ratoon.bench.rows import BenchRow, append_rows
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, model_shape, set_compile, set_recompute
from ratoon.models.config import Compile
from ratoon.planner.memory import estimate_memory
from ratoon.planner.memory_sizes import GIB, GenerationSize, MicrobatchSize, RecomputeMode, WeightsInMemory
from ratoon.trainer import MasterOptimizer
from ratoon.types.errors import UserError

MOST_OUT = 0.1
"""Of a phase's measured peak: a prediction farther from it is wrong."""

_SEED = 0
_LABEL_WIDTH = 28


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One group of N responses of R tokens to a prompt of P, and how its model runs."""

    name: str
    model: str
    config: Callable[[], PreTrainedConfig]
    P: int
    R: int
    N: int
    recompute: RecomputeMode
    compile: Compile = "none"
    needs_gpu: bool = True

    @property
    def key(self) -> dict[str, Any]:
        """The `case` of a result row."""
        return {"model": self.model, "P": self.P, "R": self.R, "N": self.N, "groups": 1}


_QWEN3_0_6B_CUT = Decoder(
    name="Qwen3-0.6B (20 of 28 layers)",
    hidden_size=1024, intermediate_size=3072, num_layers=20, num_heads=16, num_kv_heads=8, tied_embeddings=True,
)  # fmt: skip
_QWEN3_1_7B = update_cases.CASES["1.7b-p8192-r512-n16"].decoder


def _qwen3(
    name: str, decoder: Decoder, P: int, R: int, N: int, recompute: RecomputeMode, compile: Compile
) -> MemoryCase:
    return MemoryCase(
        name=name, model=decoder.name, config=lambda: decoder_config(decoder),
        P=P, R=R, N=N, recompute=recompute, compile=compile,
    )  # fmt: skip


def _smollm2(name: str, P: int, R: int, N: int, recompute: RecomputeMode, compile: Compile) -> MemoryCase:
    return MemoryCase(
        name=name, model="SmolLM2-135M", config=smollm2_config, P=P, R=R, N=N, recompute=recompute, compile=compile
    )


_CASES = (
    _qwen3("1.7b-none-compiled", _QWEN3_1_7B, 8192, 512, 16, "none", "layers"),
    _qwen3("1.7b-selective-compiled", _QWEN3_1_7B, 2048, 2048, 16, "selective", "layers"),
    _qwen3("0.6b-none", _QWEN3_0_6B_CUT, 2048, 512, 16, "none", "none"),
    _qwen3("0.6b-selective", _QWEN3_0_6B_CUT, 2048, 512, 16, "selective", "none"),
    _qwen3("0.6b-full-long", _QWEN3_0_6B_CUT, 16_384, 1024, 32, "full", "none"),
    _qwen3("0.6b-few-rows", _QWEN3_0_6B_CUT, 64, 32, 4, "none", "none"),
    _qwen3("0.6b-none-compiled", _QWEN3_0_6B_CUT, 2048, 512, 16, "none", "layers"),
    _qwen3("0.6b-full-compiled", _QWEN3_0_6B_CUT, 8192, 512, 32, "full", "layers"),
    _smollm2("135m-none", 300, 401, 33, "none", "none"),
    _smollm2("135m-selective-compiled", 1000, 200, 65, "selective", "layers"),
)
CASES = {case.name: case for case in _CASES}


def bench_memory(
    *,
    cases: Sequence[str] | None = None,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Measures the memory of each case's update, one after another.

    results: each row is appended as soon as it is measured.
    A case whose prediction is out by more than `MOST_OUT` has a row all the same, and counts as failed.
    Raises UserError for a name that does not exist, and without a GPU.
    """
    chosen = choosing.choose_cases(list(CASES) if cases is None else cases, CASES, "memory case", has_gpu=True)
    if not torch.cuda.is_available():
        raise UserError(
            "memory is measured by a GPU's allocator, and torch finds no CUDA device here; `ratoon plan RECIPE` "
            "predicts without one (--gpu-memory-gib G)"
        )
    outcome = Outcome()
    say(f"{'case':<{_LABEL_WIDTH}}{'phase':<12}{'predicted GiB':>14}{'measured GiB':>14}{'ratio':>8}")
    for case in chosen:
        with outcome.noting(case.name, case.name, say, is_ours=True, width=_LABEL_WIDTH):
            predicted, measured = measure(case)
            row = _row(case, predicted, measured, command)
            outcome.rows.append(row)
            if results is not None:
                append_rows(results, [row])
            for phase, num_bytes in measured.items():
                say(
                    f"{case.name:<{_LABEL_WIDTH}}{phase:<12}{predicted[phase] / GIB:>14.2f}{num_bytes / GIB:>14.2f}"
                    f"{predicted[phase] / num_bytes:>8.3f}"
                )
            for phase, num_bytes in measured.items():
                if abs(predicted[phase] / num_bytes - 1) > MOST_OUT:
                    reason = f"{phase} is out by more than {MOST_OUT:.0%}"
                    outcome.failed.append(Unmeasured(case_name=case.name, name=case.name, reason=reason))
        torch.compiler.reset()
        free_memory()
    return outcome


def measure(case: MemoryCase) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes, predicted and given out: what is held between updates, and the peak of each phase of one."""
    config = case.config()
    layout = pack_groups([make_group(config.vocab_size, case.P, [case.R] * case.N, _SEED)])
    free_memory()
    before = torch.cuda.memory_allocated()
    model = _build_model(case, config)
    predicted = _predict(case, model, layout)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1e-6, weight_decay=0.0, betas=(0.9, 0.95))

    def peak_of(phase: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        phase()
        return torch.cuda.max_memory_allocated() - before

    def backward() -> None:
        logprobs_M, entropy_M = forward_logprobs(model, layout)
        (logprobs_M.sum() + 0.01 * entropy_M.sum()).backward()
        del logprobs_M, entropy_M
        optimizer.accumulate()

    def step() -> None:
        optimizer.step(learning_rate=1e-6, max_grad_norm=1.0)

    backward()
    step()
    held = torch.cuda.memory_allocated() - before
    backward()
    return predicted, {"held": held, "backward": peak_of(backward), "optimizer": peak_of(step)}


def _build_model(case: MemoryCase, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.device("cuda"):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return set_compile(set_recompute(attach(model), case.recompute), case.compile)


def _predict(case: MemoryCase, model: PreTrainedModel, layout: PackedLayout) -> dict[str, int]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    estimate = estimate_memory(
        model_shape(model.config),
        WeightsInMemory(num_parameters=num_parameters, num_trainable_parameters=num_parameters, dtype_bytes=2),
        MicrobatchSize(
            num_rows=layout.num_rows,
            num_scored=layout.num_scored,
            recompute=case.recompute,
            has_qk_norm=model.config.model_type == "qwen3",
            is_compiled=case.compile == "layers",
        ),
        GenerationSize(),
        on_cuda=True,
    )
    return {"held": estimate.held, **{phase: estimate.by_phase[phase] for phase in ("backward", "optimizer")}}


def _row(case: MemoryCase, predicted: Mapping[str, int], measured: Mapping[str, int], command: str) -> BenchRow:
    figures: dict[str, float | int | str | bool | None] = {
        "case_name": case.name,
        "recompute": case.recompute,
        "compile": case.compile != "none",
        "dtype": "bfloat16",
    }
    for phase, num_bytes in measured.items():
        figures[f"{phase}_predicted_gib"] = predicted[phase] / GIB
        figures[f"{phase}_measured_gib"] = num_bytes / GIB
        figures[f"{phase}_predicted_over_measured"] = predicted[phase] / num_bytes
    return BenchRow(
        bench="memory", case=case.key, impl="auto", layout="shared", peer=False, figures=figures, command=command
    )
