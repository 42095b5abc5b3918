"""vLLM by itself, as `ratoon bench rollout --peers vllm-generate` runs it: in a process of its own."""

import asyncio

import numpy as np
import pytest
from tests.rollout.tiny import make_prompts
from tests.rollout.vllm.test_real import gap, tiny_llama

from ratoon.bench.vllm_alone import VllmAlone
from ratoon.models import attach
from ratoon.types import SamplingParams

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_groups_are_whole_and_scored_as_the_trainer_does():
    model = attach(tiny_llama())
    alone = VllmAlone(model, max_concurrent_responses=8)
    try:
        sampling = SamplingParams(temperature=0.7, max_response_tokens=12, seed=0)
        prompts = make_prompts([3, 20, 140])
        groups = asyncio.run(alone.generate_all(prompts, group_size=4, sampling=sampling, eos_ids=[]))
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in prompts]
        assert all(group.response_lengths == (12,) * 4 for group in groups)
        assert gap(model, groups, 0.7) < 2e-4
        ends = np.unique(np.concatenate([response.token_ids for response in groups[0].responses])).tolist()
        ended = asyncio.run(
            alone.generate_all(prompts, group_size=4, sampling=sampling, eos_ids=ends[: len(ends) // 2])
        )
        lengths = [length for group in ended for length in group.response_lengths]
        assert min(lengths) >= 1 and np.mean(lengths) < 12
    finally:
        asyncio.run(alone.close())
