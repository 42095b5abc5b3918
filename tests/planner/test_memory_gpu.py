"""The memory estimate against what a GPU's allocator gives out, in bfloat16.

Run on its own for a table: python -m tests.planner.test_memory_gpu
"""

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ratoon.layout import pack_groups
from ratoon.models import attach, forward_logprobs, model_shape, set_compile, set_recompute
from ratoon.models.config import Compile
from ratoon.planner.memory import estimate_memory
from ratoon.planner.memory_sizes import GenerationSize, MicrobatchSize, RecomputeMode, WeightsInMemory
from ratoon.trainer import MasterOptimizer
from ratoon.types import Prompt, Response, RolloutGroup

QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B with 20 of its 28 layers: 0.47 B weights."""

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group of N responses of R tokens to a prompt of P, and how its model runs."""

    sizes: dict[str, Any]
    recompute: RecomputeMode
    compile: Compile = "none"
    P: int = 2048
    R: int = 512
    N: int = 16

    def model(self) -> PreTrainedModel:
        with torch.device("cuda"):
            if self.sizes is QWEN3:
                model = Qwen3ForCausalLM(Qwen3Config(**self.sizes))
            else:
                model = LlamaForCausalLM(LlamaConfig(**self.sizes))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return set_compile(set_recompute(attach(model), self.recompute), self.compile)


CASES = {
    "qwen3-none": Case(sizes=QWEN3, recompute="none"),
    "qwen3-selective": Case(sizes=QWEN3, recompute="selective"),
    "qwen3-full-long": Case(sizes=QWEN3, recompute="full", P=16_384, R=1024, N=32),
    "qwen3-few-rows": Case(sizes=QWEN3, recompute="none", P=64, R=32, N=4),
    "qwen3-none-compiled": Case(sizes=QWEN3, recompute="none", compile="layers"),
    "qwen3-full-compiled": Case(sizes=QWEN3, recompute="full", compile="layers", P=8192, R=512, N=32),
    "smollm2-none": Case(sizes=SMOLLM2, recompute="none", P=300, R=401, N=33),
    "smollm2-selective-compiled": Case(sizes=SMOLLM2, recompute="selective", compile="layers", P=1000, R=200, N=65),
}


def ratios(case: Case) -> dict[str, float]:
    """Estimate over measurement, of what is held and of each phase's peak."""
    rng = np.random.default_rng(0)
    responses = tuple(Response(rng.integers(3, 9_000, case.R)) for _ in range(case.N))
    layout = pack_groups([RolloutGroup(Prompt("p", rng.integers(3, 9_000, case.P)), responses)])
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = case.model()
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1e-6, weight_decay=0.0, betas=(0.9, 0.95))

    def backward() -> int:
        torch.cuda.reset_peak_memory_stats()
        logprobs_M, entropy_M = forward_logprobs(model, layout)
        (logprobs_M.sum() + 0.01 * entropy_M.sum()).backward()
        del logprobs_M, entropy_M
        optimizer.accumulate()
        return torch.cuda.max_memory_allocated() - before

    def step() -> int:
        torch.cuda.reset_peak_memory_stats()
        optimizer.step(learning_rate=1e-6, max_grad_norm=1.0)
        return torch.cuda.max_memory_allocated() - before

    backward()
    step()
    held = torch.cuda.memory_allocated() - before
    backward()
    measured = {"held": held, "backward": backward(), "optimizer": step()}  # the second with gradients that wait
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    estimate = estimate_memory(
        model_shape(model.config),
        WeightsInMemory(num_parameters=num_parameters, num_trainable_parameters=num_parameters, dtype_bytes=2),
        MicrobatchSize(
            num_rows=layout.num_rows,
            num_scored=layout.num_scored,
            recompute=case.recompute,
            has_qk_norm=case.sizes is QWEN3,
            is_compiled=case.compile == "layers",
        ),
        GenerationSize(),
        on_cuda=True,
    )
    estimated = {"held": estimate.held, **estimate.by_phase}
    return {name: estimated[name] / num_bytes for name, num_bytes in measured.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_what_a_gpu_gives_out(name: str):
    found = ratios(CASES[name])
    print(name, found)
    for part, ratio in found.items():
        assert ratio == pytest.approx(1.0, abs=0.1), part


if __name__ == "__main__":
    for case_name, chosen in CASES.items():
        print(case_name, {part: round(ratio, 3) for part, ratio in ratios(chosen).items()}, flush=True)
