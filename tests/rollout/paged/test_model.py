"""The engine on real modules: against plain generation, and against transformers' continuous batching."""

# Shape letters: P prompt tokens, R response tokens.

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import EOS, VOCAB, assert_same_group, byte_tokenizer, draw, make_prompts, tiny_qwen3
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

from ratoon.rollout import RolloutConfig
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.rollout.engines.transformers import TransformersEngine
from ratoon.rollout.stopping import decode
from ratoon.types import FinishReason, Prompt, SamplingParams, UserError

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "pad_token_id": EOS + 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",  # others ignore the cap or the sinks
}
LENGTHS = [1, 3, 7, 8, 9, 30]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while ENGINES:
        asyncio.run(ENGINES.pop().close())


ENGINES: list[InProcessEngine] = []


def small_blocks(
    model: PreTrainedModel, *, cache_tokens: int | None = None, prefill_tokens: int = 16, restarts: bool = False
) -> InProcessEngine[PagedBatch]:
    """An engine that crosses a block every four tokens, and reads prompts in pieces."""
    twin = twin_of(model, BLOCK_ATTENTION)
    batch = PagedBatch(TorchRunner(twin, 4), 7, cache_tokens, restarts=restarts, prefill_tokens=prefill_tokens)
    engine = InProcessEngine(RolloutConfig(), model, byte_tokenizer(), twin, batch)
    ENGINES.append(engine)
    return engine


def stock(model: PreTrainedModel) -> TransformersEngine:
    engine = TransformersEngine(RolloutConfig(), model, byte_tokenizer())
    ENGINES.append(engine)
    return engine


def family(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if name == "gemma2":
        config = Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=1.0)
        return Gemma2ForCausalLM(config).double()
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)).double()
    if name == "gpt-oss":
        config = GptOssConfig(**SIZES, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)
        # Its experts' matrix product has no float64.
        return GptOssForCausalLM(config)
    return tiny_qwen3().double()


def plainly_generated(model: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """transformers' greedy generation, every token by a whole forward pass. `model`: its type lacks the mixin."""
    ids = torch.tensor(prompt.token_ids)[None]
    with torch.no_grad():
        whole = model.eval().generate(input_ids=ids, do_sample=False, max_new_tokens=num_tokens, use_cache=False)
    return whole[0, prompt.num_tokens :].tolist()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral", "gpt-oss"])
def test_greedy_output_is_that_of_plain_generate(name: str):
    """Windows of 5 tokens, capped scores, sinks and experts; prompts and responses longer than window and block."""
    model = family(name)
    prompts = make_prompts(LENGTHS)
    sampling = SamplingParams(temperature=0.0, max_response_tokens=21)
    for prompt, group in zip(prompts, draw(small_blocks(model), prompts, 2, sampling), strict=True):
        expected = plainly_generated(model, prompt, 21)
        assert [response.token_ids.tolist() for response in group.responses] == [expected] * 2
        assert len(set(expected)) > 2, "a model that repeats itself tests little"


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_sampled_output_is_that_of_the_transformers_engine(name: str):
    model = family(name)
    prompts = make_prompts(LENGTHS)
    for sampling in (
        SamplingParams(temperature=0.8, max_response_tokens=25, seed=4),
        SamplingParams(temperature=1.1, top_p=0.9, max_response_tokens=25, seed=4),
    ):
        ours = draw(small_blocks(model), prompts, 3, sampling, step=2)
        for group, reference in zip(ours, draw(stock(model), prompts, 3, sampling, step=2), strict=True):
            assert_same_group(group, reference)


def test_a_cache_of_one_response_draws_as_with_room_to_spare(model: Qwen3ForCausalLM):
    """Pre-empted again and again, and read in pieces of five tokens."""
    model = model.double()
    prompts = make_prompts([1, 9, 30])
    sampling = SamplingParams(temperature=0.9, max_response_tokens=30, seed=1)
    whole = draw(small_blocks(model), prompts, 3, sampling)
    for num_blocks in (8 + 8, 8 + 8 + 9):
        tight = small_blocks(model, cache_tokens=4 * num_blocks, prefill_tokens=5)
        for group, reference in zip(draw(tight, prompts, 3, sampling), whole, strict=True):
            assert_same_group(group, reference)
        assert tight._batch.num_free_blocks == tight._batch.num_blocks == num_blocks


def test_responses_in_flight_restart_on_new_weights_where_asked(model: Qwen3ForCausalLM):
    """After the update every token is drawn from what a whole forward pass under the new weights says."""
    model = model.double()
    other = tiny_qwen3(seed=5).double()
    prompt = make_prompts([10])[0]
    sampling = SamplingParams(temperature=0.9, max_response_tokens=40, seed=2)
    engine = small_blocks(model, restarts=True)

    async def run():
        call = asyncio.create_task(engine.generate(prompt, group_size=3, sampling=sampling, step=0))
        while sum(call.draft.num_tokens for call in engine._calls.values()) < 15:
            await asyncio.sleep(0.001)
        await engine.pause()
        with torch.no_grad():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        await engine.update_weights({}, 1)
        await engine.resume()
        return await call

    num_new = 0
    for response in asyncio.run(run()).responses:
        assert response.rollout_logprobs is not None and response.policy_versions is not None
        ids = torch.tensor(np.concatenate([prompt.token_ids, response.token_ids]))[None]
        with torch.no_grad():
            logits_RV = other.eval()(input_ids=ids, use_cache=False).logits[0, prompt.num_tokens - 1 : -1]
        logprobs_R = torch.log_softmax(logits_RV / 0.9, dim=-1).gather(1, ids[0, prompt.num_tokens :, None])[:, 0]
        is_new_R = response.policy_versions == 1
        num_new += is_new_R.sum()
        np.testing.assert_allclose(response.rollout_logprobs[is_new_R], logprobs_R.numpy()[is_new_R], atol=2e-6)
    assert num_new > 10


def test_the_last_position_of_the_context_is_used(model: Qwen3ForCausalLM):
    """A prompt that leaves room for one token, one that leaves a few, and one that leaves none."""
    assert model.config.max_position_embeddings == 256
    engine = small_blocks(model, prefill_tokens=100)
    for num_tokens, room in ((255, 1), (250, 6)):
        prompt = make_prompts([num_tokens])[0]
        sampling = SamplingParams(temperature=0.0, max_response_tokens=room)
        first, second = draw(engine, [prompt], 2, sampling)[0].responses
        assert first.token_ids.tolist() == second.token_ids.tolist() == plainly_generated(model, prompt, room)
    with pytest.raises(UserError, match="over the model's 256 positions"):
        draw(engine, make_prompts([256]), 1, SamplingParams(max_response_tokens=1))


def test_eos_as_the_first_token_ends_a_response_of_one_token(model: Qwen3ForCausalLM):
    """Of 40 responses some end at once; the others are what they are in any batch."""
    prompt = make_prompts([9])[0]
    sampling = SamplingParams(temperature=1.0, max_response_tokens=5)
    whole = draw(small_blocks(model), [prompt], 40, sampling)[0]
    common = int(whole.responses[0].token_ids[0])
    assert model.generation_config is not None
    model.generation_config.eos_token_id = common
    cut = draw(small_blocks(model), [prompt], 40, sampling)[0]
    assert cut.responses[0].token_ids.tolist() == [common]
    for before, after in zip(whole.responses, cut.responses, strict=True):
        tokens = before.token_ids.tolist()
        end = tokens.index(common) + 1 if common in tokens else len(tokens)
        assert after.token_ids.tolist() == tokens[:end]
        assert (after.finish_reason is FinishReason.EOS) == (common in tokens)


def test_a_stop_string_across_a_token_and_block_border_ends_a_response(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
):
    """Tokens 4 and 5 of a response stand in two blocks of the cache; the string of both ends it there."""
    prompt = make_prompts([9])[0]
    free = draw(small_blocks(model), [prompt], 8, SamplingParams(max_response_tokens=12))[0]
    num_stopped = 0
    for index, response in enumerate(free.responses):
        tokens = response.token_ids.tolist()
        if len(tokens) < 6:
            continue
        stop = decode(tokenizer, tokens[3:5])
        if len(stop) != 2 or "\ufffd" in stop or stop in decode(tokenizer, tokens[:4]):
            continue
        sampling = SamplingParams(max_response_tokens=12, stop=(stop,))
        stopped = draw(small_blocks(model), [prompt], 8, sampling)[0].responses[index]
        assert stopped.token_ids.tolist() == tokens[:5]
        assert stopped.finish_reason is FinishReason.STOP and stopped.text.endswith(stop)
        num_stopped += 1
    assert num_stopped > 0


def test_prompts_of_one_id_are_two_groups(model: Qwen3ForCausalLM):
    """Equal ids with equal prompts draw alike; with other prompts, each by its own."""
    one, other = make_prompts([9, 14])
    renamed = Prompt(one.id, other.token_ids)
    sampling = SamplingParams(temperature=0.9, max_response_tokens=11)
    together = draw(small_blocks(model), [one, one, renamed], 3, sampling)
    assert_same_group(together[0], together[1])
    assert_same_group(together[0], draw(small_blocks(model), [one], 3, sampling)[0])
    assert_same_group(together[2], draw(small_blocks(model), [renamed], 3, sampling)[0])


def test_a_cancelled_call_frees_its_blocks_and_disturbs_nobody(model: Qwen3ForCausalLM):
    engine = small_blocks(model)
    prompts = make_prompts([40, 20])
    sampling = SamplingParams(temperature=0.7, max_response_tokens=60)

    async def run():
        gone = asyncio.create_task(engine.generate(prompts[0], group_size=3, sampling=sampling, step=0))
        stays = asyncio.create_task(engine.generate(prompts[1], group_size=3, sampling=sampling, step=0))
        while sum(call.draft.num_tokens for call in engine._calls.values()) < 12:
            await asyncio.sleep(0.001)
        gone.cancel()
        return await stays

    assert_same_group(asyncio.run(run()), draw(small_blocks(model), [prompts[1]], 3, sampling)[0])
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.generate(prompts[0], group_size=3, sampling=sampling, step=0), 0.02))
    asyncio.run(engine.pause())  # the worker has withdrawn it
    assert engine._batch.num_running == 0 and engine._batch.num_free_blocks == engine._batch.num_blocks > 0


def test_layers_it_cannot_cache_are_refused_by_name(model: Qwen3ForCausalLM):
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="Qwen3ForCausalLM has layers of kind linear_attention"):
        small_blocks(model)
