"""Weights that change while many responses are in flight."""

# Shape letters: P prompt tokens, R response tokens, V vocabulary, C channels, W versions.

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.rollout.conftest import Build
from tests.rollout.parts import assert_within
from tests.rollout.tiny import VOCAB, make_prompts
from torch import Tensor
from transformers import Qwen3ForCausalLM

from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams

GROUP_SIZE = 5
LENGTHS = [1, 3, 16, 17, 20, 33, 9, 9, 40, 2, 5, 12, 31, 15]
"""14 prompts of 5 responses: 70 in flight."""

UPDATE_STEPS = 20
SAMPLING = SamplingParams(temperature=0.8, max_response_tokens=110, seed=2)


def heads(num_versions: int) -> Tensor:
    """[W, V, C] float64: the output head of each version. With the rest of the model as it is, hidden states do not
    depend on when a key was written, and each token's log-prob tells which head drew it."""
    generator = torch.Generator().manual_seed(6)
    return torch.randn(num_versions, VOCAB, 32, dtype=torch.float64, generator=generator) * 0.3


def set_head(model: Qwen3ForCausalLM, head_VC: Tensor) -> None:
    with torch.no_grad():
        model.lm_head.weight.copy_(head_VC)


def counted(engine: InProcessEngine[Any], loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Set after every `UPDATE_STEPS` steps of the engine, which then waits for it to be cleared."""
    due, may_go_on = asyncio.Event(), engine._batch.step
    num_steps = 0

    def step() -> Any:
        nonlocal num_steps
        report = may_go_on()
        num_steps += 1
        if num_steps % UPDATE_STEPS == 0:
            loop.call_soon_threadsafe(due.set)
        return report

    engine._batch.step = step
    return due


async def updated(engine: InProcessEngine[Any], model: Qwen3ForCausalLM, heads_WVC: Tensor) -> None:
    due = counted(engine, asyncio.get_running_loop())
    for version, head_VC in enumerate(heads_WVC[1:], start=1):
        await due.wait()
        due.clear()
        await engine.pause()
        set_head(model, head_VC)
        await engine.update_weights({}, version)
        await engine.resume()


def logprobs_by_version(model: Qwen3ForCausalLM, prompt: Prompt, tokens: np.ndarray, heads_WVC: Tensor) -> np.ndarray:
    """[W, R] of each token under each version's head, by one whole forward pass."""
    ids = torch.tensor(np.concatenate([prompt.token_ids, tokens]))[None]
    with torch.no_grad():
        hidden_RC = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, prompt.num_tokens - 1 : -1]
    logits_WRV = torch.einsum("rc,wvc->wrv", hidden_RC, heads_WVC) / SAMPLING.temperature
    target_WR1 = torch.tensor(tokens).expand(len(heads_WVC), -1)[..., None]
    return torch.log_softmax(logits_WRV, dim=-1).gather(2, target_WR1)[..., 0].numpy()


def check_stamps(model: Qwen3ForCausalLM, groups: Sequence[RolloutGroup], heads_WVC: Tensor) -> None:
    """Every token's log-prob is that of the version it is stamped with, and of no other."""
    model.eval()
    seen: set[int] = set()
    for group in groups:
        for response in group.responses:
            versions_R, logprobs_R = response.policy_versions, response.rollout_logprobs
            assert versions_R is not None and logprobs_R is not None
            assert (np.diff(versions_R) >= 0).all()
            found_WR = logprobs_by_version(model, group.prompt, response.token_ids, heads_WVC)
            gap_WR = np.abs(found_WR - logprobs_R)
            np.testing.assert_array_less(gap_WR[versions_R, np.arange(versions_R.size)], 1e-5)
            assert (gap_WR.argmin(axis=0) == versions_R).all()
            seen.update(versions_R.tolist())
    assert len(seen) >= 4


def check_all_there(prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]) -> None:
    assert [group.prompt for group in groups] == list(prompts)
    responses = [response for group in groups for response in group.responses]
    assert len(responses) == len(prompts) * GROUP_SIZE >= 64
    assert {response.finish_reason for response in responses} <= {FinishReason.LENGTH, FinishReason.EOS}
    assert len({response.token_ids.tobytes() for response in responses if response.num_tokens > 2}) == sum(
        response.num_tokens > 2 for response in responses
    ), "two responses are one"
    assert sum(response.num_tokens == SAMPLING.max_response_tokens for response in responses) > len(responses) / 2


def test_an_update_every_twenty_steps_loses_and_doubles_nothing(build: Build, model: Qwen3ForCausalLM):
    """70 responses in flight; versions do not fall, and every stamp names the weights that drew its token."""
    model = model.double()
    heads_WVC = heads(5)
    set_head(model, heads_WVC[0])
    engine = build(model)
    prompts = make_prompts(LENGTHS)

    async def run() -> list[RolloutGroup]:
        updates = asyncio.create_task(updated(engine, model, heads_WVC))
        calls = [engine.generate(prompt, group_size=GROUP_SIZE, sampling=SAMPLING, step=0) for prompt in prompts]
        groups = list(await asyncio.gather(*calls))
        await updates
        return groups

    groups = asyncio.run(run())
    check_all_there(prompts, groups)
    check_stamps(model, groups, heads_WVC)


def test_parts_drawn_between_updates_keep_the_stamps_of_their_time(build: Build, model: Qwen3ForCausalLM):
    """As above, each response stopped every 25 tokens and gone on with, across updates and beside others."""
    model = model.double()
    heads_WVC = heads(5)
    set_head(model, heads_WVC[0])
    engine = build(model)
    prompts = make_prompts(LENGTHS)

    async def one(prompt: Prompt) -> RolloutGroup:
        group: RolloutGroup | None = None
        while group is None or any(response.can_go_on for response in group.responses):
            before = group
            group = await engine.generate(
                prompt, group_size=GROUP_SIZE, sampling=SAMPLING, step=0, begun=before, max_new_tokens=25
            )
            assert_within(before, group, 25)
        return group

    async def run() -> list[RolloutGroup]:
        updates = asyncio.create_task(updated(engine, model, heads_WVC))
        groups = list(await asyncio.gather(*map(one, prompts)))
        await updates
        return groups

    groups = asyncio.run(run())
    check_all_there(prompts, groups)
    check_stamps(model, groups, heads_WVC)
