"""Weights, pauses, aborts and the end, while responses are in flight."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from tests.rollout.conftest import Build
from tests.rollout.tiny import assert_same_group, draw, make_prompts

from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.types import FinishReason, SamplingParams

TRAINING = SamplingParams(temperature=0.7, max_response_tokens=9, seed=3)


def test_tokens_are_stamped_with_the_weights_that_drew_them(build: Build):
    """Weights arrive while responses are in flight: earlier tokens keep their version, later ones get the new."""
    engine = build()
    sampling = SamplingParams(max_response_tokens=40, temperature=0.7)

    async def run():
        call = asyncio.create_task(engine.generate(make_prompts([20])[0], group_size=3, sampling=sampling, step=0))
        await tokens_drawn(engine, 6)
        await engine.update_weights({}, 1)
        return await call

    for response in asyncio.run(run()).responses:
        versions = response.policy_versions
        assert versions is not None and versions[0] == 0
        assert (np.diff(versions) >= 0).all()
        assert response.num_tokens < 15 or versions[-1] == 1


async def tokens_drawn(engine: InProcessEngine[Any], num_tokens: int) -> None:
    while sum(call.draft.num_tokens for call in engine._calls.values()) < num_tokens:
        await asyncio.sleep(0.001)


def test_pause_draws_nothing_and_resume_goes_on(build: Build):
    """verl#7207: a response that was interrupted keeps its token budget, and its draws. miles#2589, tpu-inference#3362,
    halo#8: a pause aborted what was in flight."""
    engine = build()
    sampling = SamplingParams(max_response_tokens=30, temperature=0.7)
    prompts = make_prompts([20, 5])

    async def run():
        calls = [
            asyncio.create_task(engine.generate(prompt, group_size=2, sampling=sampling, step=0)) for prompt in prompts
        ]
        await tokens_drawn(engine, 8)
        await engine.pause()
        counts = [call.draft.num_tokens for call in engine._calls.values()]
        late = asyncio.create_task(engine.generate(make_prompts([3])[0], group_size=1, sampling=sampling, step=1))
        await asyncio.sleep(0.05)
        assert [call.draft.num_tokens for call in engine._calls.values()] == [*counts, 0]
        await engine.resume()
        return await asyncio.gather(*calls), await late

    interrupted, late = asyncio.run(run())
    assert late.responses[0].num_tokens > 0
    for group, reference in zip(interrupted, draw(build(), prompts, 2, sampling), strict=True):
        assert max(group.response_lengths) <= 30
        assert_same_group(group, reference)


def test_abort_hands_out_what_there_is(build: Build):
    """Running, waiting and paused responses end with their tokens so far, each a prefix of the whole response."""
    engine = build(max_concurrent_responses=4)
    sampling = SamplingParams(max_response_tokens=60, temperature=0.7)
    prompts = make_prompts([20, 5, 9])

    async def run(is_paused: bool):
        calls = [
            asyncio.create_task(engine.generate(prompt, group_size=3, sampling=sampling, step=0)) for prompt in prompts
        ]
        await tokens_drawn(engine, 8)
        if is_paused:
            await engine.pause()
        await engine.abort()
        groups = await asyncio.gather(*calls)
        if is_paused:
            await engine.resume()
        return groups

    whole = draw(build(), prompts, 3, sampling)
    for is_paused in (False, True):
        groups = asyncio.run(run(is_paused))
        reasons = {response.finish_reason for group in groups for response in group.responses}
        assert FinishReason.ABORT in reasons
        assert groups[2].response_lengths == (0, 0, 0)
        assert 8 <= sum(groups[0].response_lengths) < 180
        for group, reference in zip(groups, whole, strict=True):
            for part, full in zip(group.responses, reference.responses, strict=True):
                assert part.token_ids.tolist() == full.token_ids[: part.num_tokens].tolist()
                assert part.rollout_logprobs is not None and part.rollout_logprobs.shape == (part.num_tokens,)
    # The engine serves on.
    for group, reference in zip(draw(engine, prompts, 3, sampling), whole, strict=True):
        assert_same_group(group, reference)


def test_close_leaves_no_thread_and_can_be_called_twice(build: Build):
    before = set(threading.enumerate())
    engine = build()
    draw(engine, make_prompts([3, 9]), 2, TRAINING)
    assert set(threading.enumerate()) != before
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        draw(engine, make_prompts([3]), 1, TRAINING)
    idle = build()
    asyncio.run(idle.close())
    assert set(threading.enumerate()) == before


def test_close_aborts_what_is_in_flight(build: Build):
    engine = build()

    async def run():
        sampling = SamplingParams(max_response_tokens=200)
        call = asyncio.create_task(engine.generate(make_prompts([20])[0], group_size=2, sampling=sampling, step=0))
        await tokens_drawn(engine, 4)
        await engine.close()
        return await call

    assert {response.finish_reason for response in asyncio.run(run()).responses} >= {FinishReason.ABORT}
