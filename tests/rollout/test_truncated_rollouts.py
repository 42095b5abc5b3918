"""Responses drawn among the likeliest tokens: what is recorded of each draw, and what it depends on."""

# Shape letters: V vocabulary.

import asyncio

import numpy as np
import pytest
import torch
from tests.rollout.conftest import Build
from tests.rollout.test_truncation import oracle_kept
from tests.rollout.tiny import EOS, assert_same_group, draw, make_prompts, tiny_qwen3
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ratoon.rollout.draws import response_key, uniform_draws
from ratoon.rollout.stopping import decode
from ratoon.rollout.truncation import Truncation
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SamplingParams, UserError

LENGTHS = [1, 2, 16, 17, 33]
TRUNCATED = [
    SamplingParams(temperature=0.7, top_k=20, max_response_tokens=9, seed=3),
    SamplingParams(temperature=0.7, top_p=0.8, max_response_tokens=9, seed=3),
    SamplingParams(temperature=1.2, min_p=0.1, max_response_tokens=9, seed=3),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02, max_response_tokens=9, seed=3),
]
TOP_P = TRUNCATED[1]


def kept_sets(response: Response) -> list[list[int]]:
    support = response.support
    assert support is not None and support.num_tokens == response.num_tokens
    return [ids.tolist() for ids in np.split(support.token_ids, support.offsets[1:-1])]


def assert_same_rollouts(left: RolloutGroup, right: RolloutGroup) -> None:
    assert_same_group(left, right)
    for one, other in zip(left.responses, right.responses, strict=True):
        assert kept_sets(one) == kept_sets(other)


def assert_drawn_alone(model: Qwen3ForCausalLM, prompt: Prompt, index: int, response: Response, sampling) -> None:
    """Each token again by a whole forward pass: its set, its draw, its log-prob."""
    key = np.array([response_key(sampling.seed, 0, prompt.id, index)], np.uint64)
    truncation = Truncation.of(sampling)
    assert truncation is not None and response.rollout_logprobs is not None
    tokens: list[int] = []
    for position, kept in enumerate(kept_sets(response)):
        ids = torch.tensor([prompt.token_ids.tolist() + tokens])
        with torch.no_grad():
            logits_V = model(input_ids=ids, use_cache=False).logits[0, -1].numpy()
        assert kept == sorted(oracle_kept(logits_V, truncation))
        scaled = logits_V[kept].astype(np.float64) / sampling.temperature
        logprobs = scaled - np.log(np.exp(scaled).sum())
        uniform = uniform_draws(key, np.array([position]))[0]
        place = int(np.searchsorted(np.exp(logprobs).cumsum(), uniform))
        tokens.append(kept[place])
        assert response.rollout_logprobs[position] == pytest.approx(logprobs[place], abs=1e-5)
    assert response.token_ids.tolist() == tokens
    assert tokens[-1] == EOS or len(tokens) == sampling.max_response_tokens


@pytest.mark.parametrize("sampling", TRUNCATED)
def test_draws_are_those_of_one_response_at_a_time(build: Build, model: Qwen3ForCausalLM, sampling: SamplingParams):
    """TRL#6789, verl#6240: what is recorded is renormalised over the kept tokens, and the kept tokens with it."""
    prompts = make_prompts(LENGTHS)
    groups = draw(build(), prompts, 2, sampling)
    model.eval()
    sizes: set[int] = set()
    for prompt, group in zip(prompts, groups, strict=True):
        for index, response in enumerate(group.responses):
            assert_drawn_alone(model, prompt, index, response, sampling)
            sizes |= {len(kept) for kept in kept_sets(response)}
    assert max(sizes) < 258 and (len(sizes) > 3 or sizes == {20})


@pytest.mark.parametrize("sampling", [TOP_P, pytest.param(TRUNCATED[2], marks=pytest.mark.full)])
def test_no_draw_depends_on_the_batch(build: Build, sampling: SamplingParams):
    """Alone, in other company and order, through a small cache and few slots: the same tokens among the same sets."""
    prompts = make_prompts(LENGTHS)
    whole = draw(build(), prompts, 4, sampling)
    alone = build()
    for prompt, group in zip(prompts, whole, strict=True):
        assert_same_rollouts(draw(alone, [prompt], 4, sampling)[0], group)
    backwards = draw(build(max_concurrent_responses=5), prompts[::-1], 4, sampling)
    for group, reference in zip(backwards[::-1], whole, strict=True):
        assert_same_rollouts(group, reference)
    for group, reference in zip(draw(build(cache_tokens=160), prompts, 2, sampling), whole, strict=True):
        assert_same_rollouts(group, reference.select([0, 1]))


def test_groups_of_every_distribution_share_a_batch(build: Build):
    """Evaluation beside training: greedy, plain and truncated ones, each drawn as it would be alone."""
    prompts = make_prompts([9, 21, 5, 12, 7])
    plain = SamplingParams(temperature=0.7, max_response_tokens=9, seed=3)
    greedy = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, max_response_tokens=9)
    several = [greedy, plain, *TRUNCATED[:3]]
    engine = build()

    async def together() -> list[RolloutGroup]:
        pairs = zip(prompts, several, strict=True)
        calls = [engine.generate(prompt, group_size=3, sampling=params, step=0) for prompt, params in pairs]
        return list(await asyncio.gather(*calls))

    groups = asyncio.run(together())
    for prompt, sampling, group in zip(prompts, several, groups, strict=True):
        alone = draw(build(), [prompt], 3, sampling)[0]
        if sampling is greedy:
            tokens = [[r.token_ids.tolist() for r in found.responses] for found in (group, alone)]
            assert tokens[0] == tokens[1]
        elif sampling is plain:
            assert_same_group(group, alone)
        else:
            assert_same_rollouts(group, alone)
        if sampling in (greedy, plain):
            assert all(response.support is None for response in group.responses)


def test_a_stop_string_cuts_tokens_log_probs_and_sets_alike(build: Build, tokenizer: PreTrainedTokenizerFast):
    """Drawn with top-k: the same draws as without the stop, up to the token that completes it."""
    prompts = make_prompts([12, 30])
    plain = SamplingParams(temperature=1.0, top_k=40, max_response_tokens=30, seed=1)
    free = draw(build(), prompts, 4, plain)
    texts = [decode(tokenizer, response.token_ids[4:8].tolist()) for group in free for response in group.responses]
    stop = tuple(text[:2] for text in texts if text[:2].isascii() and text[:2].isprintable() and len(text) > 1)[:3]
    assert stop
    stopped = draw(
        build(), prompts, 4, SamplingParams(temperature=1.0, top_k=40, max_response_tokens=30, seed=1, stop=stop)
    )
    num_stopped = 0
    for before, after in zip(free, stopped, strict=True):
        for whole, cut in zip(before.responses, after.responses, strict=True):
            R = cut.num_tokens
            assert cut.token_ids.tolist() == whole.token_ids[:R].tolist()
            assert kept_sets(cut) == kept_sets(whole)[:R]
            assert cut.rollout_logprobs is not None and cut.rollout_logprobs.size == R
            if cut.finish_reason is FinishReason.STOP:
                num_stopped += 1
                assert cut.text.endswith(stop)
                assert not any(text in decode(tokenizer, cut.token_ids[:-1].tolist()) for text in stop)
    assert num_stopped >= 1


def test_an_aborted_response_keeps_the_sets_of_its_tokens(build: Build):
    engine = build()

    async def run() -> RolloutGroup:
        prompt = make_prompts([20])[0]
        sampling = SamplingParams(top_k=5, max_response_tokens=200)
        call = asyncio.create_task(engine.generate(prompt, group_size=2, sampling=sampling, step=0))
        while not engine._calls or not next(iter(engine._calls.values())).draft.drafts[1].token_ids:
            await asyncio.sleep(0.001)
        await engine.abort()
        return await call

    for response in asyncio.run(run()).responses:
        assert response.finish_reason is FinishReason.ABORT
        assert all(len(kept) == 5 for kept in kept_sets(response)) and response.num_tokens > 0


def test_new_weights_are_drawn_among_their_own_likeliest(build: Build, model: Qwen3ForCausalLM):
    engine = build()
    prompts = make_prompts([18])
    draw(engine, prompts, 2, TOP_P)
    other = tiny_qwen3(seed=5)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)
    asyncio.run(engine.update_weights({}, 1))
    assert_same_rollouts(draw(engine, prompts, 2, TOP_P)[0], draw(build(of=other), prompts, 2, TOP_P)[0])


def test_supports_that_outgrow_their_share_are_the_users_error(build: Build, model: Qwen3ForCausalLM):
    """Top-p alone on a flat distribution keeps most of the vocabulary for each token. One MiB holds 2**18 ids; in 2,000
    responses a step each may have 131. The engine serves on."""
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    engine = build(prompts_per_step=200, group_size=10, max_support_mib=1)
    prompts = make_prompts([9, 12])
    flat = SamplingParams(top_p=0.95, max_response_tokens=4)
    with pytest.raises(UserError, match=r"prompt 'p\d'.* kept tokens each.*rollout\.max_support_mib.*set top_k"):
        draw(engine, prompts, 2, flat)
    narrow = SamplingParams(top_p=0.95, top_k=30, max_response_tokens=4)
    groups = draw(engine, prompts, 2, narrow)
    assert all(len(kept) <= 30 for group in groups for response in group.responses for kept in kept_sets(response))
    # Greedy and untruncated responses record nothing.
    draw(engine, prompts, 2, SamplingParams(max_response_tokens=4))


def test_logits_that_are_not_finite_are_named(build: Build, model: Qwen3ForCausalLM):
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    for sampling in TRUNCATED:
        with pytest.raises(Exception, match="logits are not finite"):
            draw(build(), make_prompts([4]), 1, sampling)
