"""Responses stopped at a budget or by an abort, and gone on with: the responses that were never stopped."""

# Shape letters: P prompt tokens, R response tokens, N responses.

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.rollout.conftest import Build
from tests.rollout.parts import draw_in_parts
from tests.rollout.tiny import EOS, VOCAB, assert_same_group, draw, make_prompts
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.stopping import decode
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SampledSupport, SamplingParams, UserError

LENGTHS = [1, 16, 33]
SAMPLINGS = {
    "sampled": SamplingParams(temperature=0.9, max_response_tokens=23, seed=4),
    "top-p": SamplingParams(temperature=1.1, top_p=0.8, max_response_tokens=23, seed=4),
    "all three": SamplingParams(temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, max_response_tokens=23, seed=4),
    "greedy": SamplingParams(temperature=0.0, max_response_tokens=23),
}


def assert_identical(left: RolloutGroup, right: RolloutGroup, logprob_atol: float) -> None:
    for a, b in zip(left.responses, right.responses, strict=True):
        assert (a.finish_reason, a.text, a.token_ids.tolist()) == (b.finish_reason, b.text, b.token_ids.tolist())
        assert a.policy_versions is not None and b.policy_versions is not None
        assert a.policy_versions.tolist() == b.policy_versions.tolist()
        assert (a.rollout_logprobs is None) == (b.rollout_logprobs is None)
        if a.rollout_logprobs is not None and b.rollout_logprobs is not None:
            np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, rtol=0, atol=logprob_atol)
        assert (a.support is None) == (b.support is None)
        if a.support is not None and b.support is not None:
            assert a.support.offsets.tolist() == b.support.offsets.tolist()
            assert a.support.token_ids.tolist() == b.support.token_ids.tolist()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_response_in_parts_is_the_undivided_one(build: Build, model: Qwen3ForCausalLM, name: str):
    """verl#7207: what goes on keeps to its length.

    In float64, where prefilled and decoded keys hardly differ: tokens, supports and ends are the same, and log-probs
    bit by bit, but for the rounding of the transformers engine, which computes in float32 in places.
    """
    model = model.double()
    prompts = make_prompts(LENGTHS)
    whole = draw(build(model), prompts, 3, SAMPLINGS[name], step=7)
    if SAMPLINGS[name].temperature:
        model.generation_config.eos_token_id = int(whole[1].responses[0].token_ids[8])
        whole = draw(build(model), prompts, 3, SAMPLINGS[name], step=7)
        reasons = {response.finish_reason for group in whole for response in group.responses}
        assert reasons == {FinishReason.EOS, FinishReason.LENGTH}
    engine = build(model, max_concurrent_responses=5)
    atol = 0.0 if isinstance(engine._batch, PagedBatch) else 5e-6
    for budgets in ((4,), (16, 1, 2), (22,)):
        parts = draw_in_parts(engine, prompts, 3, SAMPLINGS[name], budgets, step=7)
        for group, reference in zip(parts, whole, strict=True):
            assert_identical(group, reference, atol)


def test_log_probs_in_float32_are_equal_to_rounding(build: Build):
    prompts = make_prompts(LENGTHS)
    whole = draw(build(), prompts, 3, SAMPLINGS["top-p"])
    for group, reference in zip(draw_in_parts(build(), prompts, 3, SAMPLINGS["top-p"], (4,)), whole, strict=True):
        assert_same_group(group, reference)


def test_a_stop_string_across_the_border_of_two_calls_ends_a_response(build: Build, tokenizer: PreTrainedTokenizerFast):
    """The string's bytes are drawn in two calls, at every place of the border in it."""
    prompt = make_prompts([9])[0]
    free = draw(build(), [prompt], 8, SamplingParams(max_response_tokens=12))[0]
    engine, num_stopped = build(), 0
    for index, response in enumerate(free.responses):
        tokens = response.token_ids.tolist()
        stop = decode(tokenizer, tokens[3:6])
        if len(tokens) < 7 or len(stop) != 3 or "\ufffd" in stop or stop in decode(tokenizer, tokens[:5]):
            continue
        sampling = SamplingParams(max_response_tokens=12, stop=(stop,))
        for budget in (3, 4, 5, 6):
            stopped = draw_in_parts(engine, [prompt], 8, sampling, (budget, 1))[0].responses[index]
            assert stopped.token_ids.tolist() == tokens[:6]
            assert stopped.finish_reason is FinishReason.STOP and stopped.text.endswith(stop)
        num_stopped += 1
    assert num_stopped > 0


def test_an_aborted_group_goes_on_as_if_nothing_had_been(build: Build):
    """Some of its responses have tokens, others have none yet and share their prompt again."""
    prompts = make_prompts([20, 5, 9])
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_response_tokens=40)
    engine = build(max_concurrent_responses=4)

    async def run() -> list[RolloutGroup]:
        def calls(begun: list[RolloutGroup | None]) -> list[asyncio.Task[RolloutGroup]]:
            return [
                asyncio.create_task(engine.generate(prompt, group_size=3, sampling=sampling, step=0, begun=before))
                for prompt, before in zip(prompts, begun, strict=True)
            ]

        first = calls([None] * 3)
        while sum(call.draft.num_tokens for call in engine._calls.values()) < 30:
            await asyncio.sleep(0.001)
        await engine.abort()
        parts = list(await asyncio.gather(*first))
        lengths = [response.num_tokens for group in parts for response in group.responses if response.can_go_on]
        assert 0 in lengths and max(lengths) > 0
        return list(await asyncio.gather(*calls(list(parts))))

    for group, reference in zip(asyncio.run(run()), draw(build(), prompts, 3, sampling), strict=True):
        assert_same_group(group, reference)


def test_a_group_that_has_ended_is_handed_back_at_once(build: Build):
    """Its responses as they are, even while the engine is paused; one that was aborted after its last token ends."""
    engine = build()
    prompt = make_prompts([9])[0]
    sampling = SamplingParams(max_response_tokens=4, temperature=0.7)
    ended = draw(engine, [prompt], 2, sampling)[0]
    cut = replace(ended.responses[0], finish_reason=FinishReason.ABORT)
    assert cut.num_tokens == 4

    async def again(begun: RolloutGroup) -> RolloutGroup:
        await engine.pause()
        group = await engine.generate(prompt, group_size=2, sampling=sampling, step=0, begun=begun, max_new_tokens=1)
        await engine.resume()
        return group

    same = asyncio.run(again(ended))
    assert all(after is before for after, before in zip(same.responses, ended.responses, strict=True))
    assert_same_group(asyncio.run(again(replace(ended, responses=(cut, ended.responses[1])))), ended)


def test_a_cancelled_call_leaves_what_it_was_to_go_on_with(build: Build):
    engine = build()
    prompts = make_prompts([30, 12])
    sampling = SamplingParams(temperature=0.7, max_response_tokens=60)

    async def run() -> list[RolloutGroup]:
        options: dict[str, Any] = {"group_size": 3, "sampling": sampling, "step": 0}
        begun = await asyncio.gather(*(engine.generate(prompt, **options, max_new_tokens=5) for prompt in prompts))
        gone = asyncio.create_task(engine.generate(prompts[0], **options, begun=begun[0]))
        stays = asyncio.create_task(engine.generate(prompts[1], **options, begun=begun[1]))
        while sum(call.draft.num_tokens for call in engine._calls.values()) < 45:
            await asyncio.sleep(0.001)
        gone.cancel()
        return [await engine.generate(prompts[0], **options, begun=begun[0]), await stays]

    for group, reference in zip(asyncio.run(run()), draw(build(), prompts, 3, sampling), strict=True):
        assert_same_group(group, reference)


def test_eos_as_the_first_token_of_a_call_ends_a_response(build: Build, model: Qwen3ForCausalLM):
    """Of the first call (a response of one token), and of the second: EOS never has a token behind it."""
    prompt = make_prompts([9])[0]
    sampling = SamplingParams(temperature=1.0, max_response_tokens=6)
    free = draw(build(), [prompt], 40, sampling)[0]
    for place in (0, 3):
        eos = int(free.responses[0].token_ids[place])
        assert model.generation_config is not None
        model.generation_config.eos_token_id = eos
        cut = draw_in_parts(build(), [prompt], 40, sampling, (3,))[0]
        assert cut.responses[0].token_ids.tolist()[-1] == eos and cut.responses[0].num_tokens <= place + 1
        for before, after in zip(free.responses, cut.responses, strict=True):
            tokens = before.token_ids.tolist()
            end = tokens.index(eos) + 1 if eos in tokens else None
            if EOS not in tokens:
                assert after.token_ids.tolist() == tokens[:end]
                assert (after.finish_reason is FinishReason.EOS) == (eos in tokens)


def test_the_last_position_of_the_context_is_reached_in_parts(build: Build, model: Qwen3ForCausalLM):
    """A prompt that leaves room for one token, and one that leaves a few; one that leaves none is refused."""
    assert model.config.max_position_embeddings == 256
    for num_tokens, room in ((255, 1), (250, 6)):
        prompt = make_prompts([num_tokens])[0]
        sampling = SamplingParams(temperature=0.8, max_response_tokens=room)
        assert_same_group(
            draw_in_parts(build(), [prompt], 2, sampling, (4, 1))[0], draw(build(), [prompt], 2, sampling)[0]
        )
    with pytest.raises(UserError, match="over the model's 256 positions"):
        draw_in_parts(build(), make_prompts([256]), 1, SamplingParams(max_response_tokens=1), (1,))


def test_prompts_of_one_id_go_on_as_two_groups(build: Build):
    """Begun in one step they draw alike, in two steps each by its own, whenever and beside whomever they go on."""
    prompt = make_prompts([9])[0]
    sampling = SamplingParams(temperature=0.9, max_response_tokens=11)
    engine = build()

    async def run() -> list[RolloutGroup]:
        begun = [
            await engine.generate(prompt, group_size=3, sampling=sampling, step=step, max_new_tokens=budget)
            for step, budget in ((0, 2), (0, 5), (1, 2))
        ]
        calls = [
            engine.generate(prompt, group_size=3, sampling=sampling, step=step, begun=group)
            for step, group in zip((0, 0, 1), begun, strict=True)
        ]
        return list(await asyncio.gather(*calls))

    first, second, third = asyncio.run(run())
    assert_same_group(first, second)
    assert_same_group(first, draw(build(), [prompt], 3, sampling, step=0)[0])
    assert_same_group(third, draw(build(), [prompt], 3, sampling, step=1)[0])


@pytest.mark.parametrize("budget", [0, -1])
def test_an_empty_budget_is_refused_by_name(build: Build, budget: int):
    async def run() -> None:
        sampling = SamplingParams(max_response_tokens=4)
        await build().generate(make_prompts([3])[0], group_size=1, sampling=sampling, step=0, max_new_tokens=budget)

    with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1, got {budget}"):
        asyncio.run(run())


PROMPT = Prompt("p0", np.array([5, 6, 7]))
BEGUN = Response(np.array([1, 2]), np.array([-1.0, -2.0]), "", FinishReason.BUDGET, np.array([0, 0]))
KEPT = SampledSupport.of([np.array([1, 4], np.int32), np.array([2], np.int32)])


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        (RolloutGroup(replace(PROMPT, id="p1"), (BEGUN, BEGUN)), "is of prompt 'p1' of 3 tokens, not of this one of 3"),
        (RolloutGroup(Prompt("p0", np.array([5, 6])), (BEGUN, BEGUN)), "is of prompt 'p0' of 2 tokens"),
        (RolloutGroup(PROMPT, (BEGUN,)), "has 1 responses, but group_size is 2"),
        (RolloutGroup(PROMPT, (BEGUN, replace(BEGUN, rollout_logprobs=None))), "response 1 has no rollout_logprobs"),
        (RolloutGroup(PROMPT, (BEGUN, replace(BEGUN, policy_versions=None))), "which weights drew its tokens"),
        (RolloutGroup(PROMPT, (replace(BEGUN, token_ids=[1, VOCAB]), BEGUN)), f"holds token id {VOCAB}, but the model"),
        (RolloutGroup(PROMPT, (replace(BEGUN, support=KEPT), BEGUN)), "has a support, but its sampling keeps all"),
        (
            RolloutGroup(
                PROMPT,
                (Response(np.ones(9, int), np.zeros(9, np.float32), "", FinishReason.BUDGET, np.zeros(9, int)), BEGUN),
            ),
            "response 0 has 9 tokens, over max_response_tokens=8",
        ),
        (
            RolloutGroup(PROMPT, (replace(BEGUN, routed_experts=np.zeros((5, 1, 1), np.int16)), BEGUN)),
            "response 0 has routed_experts, and none would be recorded of its next tokens",
        ),
    ],
    ids=["id", "tokens", "size", "log-probs", "versions", "vocabulary", "support", "length", "routes"],
)
def test_a_group_that_is_not_this_calls_is_refused_by_name(build: Build, begun: RolloutGroup, message: str):
    sampling = SamplingParams(max_response_tokens=8)
    with pytest.raises(ValueError, match=message):
        asyncio.run(build().generate(PROMPT, group_size=2, sampling=sampling, step=0, begun=begun))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_response_tokens=8, top_k=5), "has no support, but its sampling keeps some"),
        (SamplingParams(max_response_tokens=8, temperature=0.0), "which does not go with temperature 0"),
    ],
    ids=["truncated", "greedy"],
)
def test_a_group_of_another_sampling_is_refused_by_name(build: Build, sampling: SamplingParams, message: str):
    begun = RolloutGroup(PROMPT, (BEGUN,))
    with pytest.raises(ValueError, match=message):
        asyncio.run(build().generate(PROMPT, group_size=1, sampling=sampling, step=0, begun=begun))


def test_supports_of_earlier_calls_count_towards_the_share(build: Build):
    """What a response may record is one share, in however many calls it is drawn."""
    prompt = make_prompts([5])[0]
    sampling = SamplingParams(temperature=2.0, top_p=0.999, max_response_tokens=40)
    settings: dict[str, Any] = {"prompts_per_step": 64, "group_size": 64, "max_support_mib": 1}
    with pytest.raises(UserError, match="max_support_mib"):
        draw_in_parts(build(**settings), [prompt], 2, sampling, (1,))
