"""Run in a fresh process by test_memory.py: prints, as JSON, the bytes that one model's updates really take."""

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, build_fresh, forward_logprobs, load_policy, set_recompute
from ratoon.models.config import FreshModelConfig
from ratoon.models.load import DTYPES
from ratoon.trainer import MasterOptimizer
from ratoon.types import Prompt, Response, RolloutGroup


def main(request: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    small, large = layout_of(3, 3, 2), layout_of(request["P"], request["R"], request["N"])
    warm, _ = build_fresh(FreshModelConfig(hidden_size=16, num_layers=1), seed=0)
    forward_logprobs(attach(warm), small)[0].sum().backward()  # libraries' own buffers are not the model's
    before = resident_bytes()

    model = make_model(request)
    set_recompute(model, request["recompute"])
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1e-6, weight_decay=0.0, betas=(0.9, 0.95))
    backward(model, small, optimizer)
    optimizer.step(learning_rate=1e-6, max_grad_norm=1.0)
    held = resident_bytes() - before
    backward(model, small, optimizer)  # gradients wait, as between microbatches
    gradients = resident_bytes() - before - held
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
        backward(model, large, optimizer)
    return {
        "held": held,
        "gradients": gradients,
        "peak_rise": peak_rise(profiler),
        "num_rows": large.num_rows,
        "num_scored": large.num_scored,
    }


def layout_of(P: int, R: int, N: int) -> PackedLayout:
    rng = np.random.default_rng(0)
    responses = tuple(Response(rng.integers(3, 40, R)) for _ in range(N))
    return pack_groups([RolloutGroup(Prompt("p", rng.integers(3, 40, P)), responses)])


def make_model(request: dict[str, Any]) -> PreTrainedModel:
    dtype = DTYPES[request["dtype"]]
    if "fresh" not in request:
        return load_policy(request["path"], gguf_file=request["gguf_file"], dtype=request["dtype"])
    model, _ = build_fresh(FreshModelConfig(**request["fresh"]), seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return attach(model)


def backward(model: PreTrainedModel, layout: PackedLayout, optimizer: MasterOptimizer) -> None:
    forward_logprobs(model, layout)[0].sum().backward()
    optimizer.accumulate()


def resident_bytes() -> int:
    """Of this process, what was freed given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def peak_rise(profiler: Any) -> int:
    """Highest sum of what torch's allocator gave out and took back."""
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
