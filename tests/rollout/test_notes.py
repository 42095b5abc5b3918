"""What engines say of themselves when a run begins."""

import asyncio
from typing import Any, cast

import pytest
import torch
from tests.rollout.paged.moe import gpt_oss
from tests.rollout.tiny import byte_tokenizer, tiny_qwen3

from ratoon.rollout import RolloutConfig, RolloutEngine, build_engine, engine_notes


@pytest.mark.parametrize("name", ["transformers", "paged"])
def test_on_a_cpu_there_is_nothing_to_say(name: Any):
    engine = build_engine(RolloutConfig(engine=name), tiny_qwen3(), byte_tokenizer())
    assert engine_notes(engine) == ()
    asyncio.run(engine.close())


def test_what_is_no_engine_of_ours_says_nothing():
    assert engine_notes(cast("RolloutEngine", object())) == ()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "num_notes"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_on_a_gpu_experts_that_no_graph_can_hold_are_named(dtype: torch.dtype, num_notes: int):
    from ratoon.models import attach

    model: Any = gpt_oss()
    engine = build_engine(RolloutConfig(engine="paged"), attach(model.to("cuda", dtype)), byte_tokenizer())
    notes = engine_notes(engine)
    assert len(notes) == num_notes
    assert all("without CUDA graphs: its experts are float32" in note for note in notes)
    asyncio.run(engine.close())
