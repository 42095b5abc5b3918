"""What the in-process engine draws, where responses end, and that it leaves everything else alone."""

import asyncio

import numpy as np
import pytest
import torch
from tests.rollout.conftest import Build
from tests.rollout.tiny import EOS, NUM_BYTES, assert_same_group, draw, make_prompts, tiny_qwen3
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ratoon.rollout import RolloutEngine
from ratoon.rollout.draws import response_key, uniform_draws
from ratoon.rollout.stopping import decode
from ratoon.types import FinishReason, Prompt, SamplingParams, UserError

TRAINING = SamplingParams(temperature=0.7, max_response_tokens=9, seed=3)
# Odd lengths, one token, and both sides of the cache's block of 16 tokens.
REPLACED = "model.layers.1.mlp.up_proj.weight"
LENGTHS = [1, 2, 16, 17, 33, 50]


def oracle_tokens(
    model: Qwen3ForCausalLM, prompt: Prompt, index: int, sampling: SamplingParams, step: int
) -> tuple[list[int], list[float]]:
    """One response drawn by itself: a whole forward pass a token, and the inverse of the cumulative distribution."""
    key = np.array([response_key(sampling.seed, step, prompt.id, index)], np.uint64)
    tokens: list[int] = []
    logprobs: list[float] = []
    model.eval()
    for position in range(sampling.max_response_tokens):
        ids = torch.tensor([prompt.token_ids.tolist() + tokens])
        with torch.no_grad():
            logits_V = model(input_ids=ids, use_cache=False).logits[0, -1].double() / sampling.temperature
        logprobs_V = torch.log_softmax(logits_V, dim=-1).numpy()
        uniform = uniform_draws(key, np.array([position]))[0]
        token = int(np.searchsorted(np.exp(logprobs_V).cumsum(), uniform))
        tokens.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token == EOS:
            break
    model.train()
    return tokens, logprobs


def test_engine_is_a_rollout_engine(build: Build):
    assert isinstance(build(), RolloutEngine)


def test_draws_are_those_of_one_response_at_a_time(build: Build, model: Qwen3ForCausalLM):
    """TRL#4159: the log-probs are those of the temperature-scaled distribution; TRL#6789: over the whole vocabulary."""
    prompts = make_prompts(LENGTHS)
    groups = draw(build(), prompts, 3, TRAINING, step=5)
    for prompt, group in zip(prompts, groups, strict=True):
        assert group.prompt is prompt
        for index, response in enumerate(group.responses):
            tokens, logprobs = oracle_tokens(model, prompt, index, TRAINING, step=5)
            assert response.token_ids.tolist() == tokens
            assert response.rollout_logprobs is not None
            np.testing.assert_allclose(response.rollout_logprobs, logprobs, rtol=0, atol=5e-6)


def test_no_draw_depends_on_the_batch(build: Build):
    """Alone, in other company, in another order, through a small cache and few slots, from another global generator,
    and in a fresh engine: the same responses."""
    prompts = make_prompts(LENGTHS)
    whole = draw(build(), prompts, 4, TRAINING)
    torch.manual_seed(99)
    alone = build()
    for prompt, group in zip(prompts, whole, strict=True):
        assert_same_group(draw(alone, [prompt], 4, TRAINING)[0], group)
    backwards = draw(build(max_concurrent_responses=5), prompts[::-1], 4, TRAINING)
    for group, reference in zip(backwards[::-1], whole, strict=True):
        assert_same_group(group, reference)
    for group, reference in zip(draw(build(cache_tokens=160), prompts, 4, TRAINING), whole, strict=True):
        assert_same_group(group, reference)
    fewer = draw(build(), prompts, 2, TRAINING)
    for group, reference in zip(fewer, whole, strict=True):
        assert_same_group(group, reference.select([0, 1]))


def test_step_seed_id_and_index_each_change_the_draws(build: Build):
    engine = build()
    prompt, other = make_prompts([7, 7])
    first, second = (
        [response.token_ids.tolist() for response in draw(engine, [prompt], 2, TRAINING, step=step)[0].responses]
        for step in (0, 1)
    )
    assert first[0] != first[1] and first != second
    renamed = Prompt("another", prompt.token_ids)
    reseeded = SamplingParams(temperature=0.7, max_response_tokens=9, seed=4)
    for changed in (draw(engine, [renamed], 2, TRAINING), draw(engine, [prompt], 2, reseeded)):
        assert [response.token_ids.tolist() for response in changed[0].responses] != first
    # An integer id and its digits are two prompts.
    one, digit = draw(engine, [Prompt(1, other.token_ids), Prompt("1", other.token_ids)], 1, TRAINING)
    assert one.responses[0].token_ids.tolist() != digit.responses[0].token_ids.tolist()


def test_draws_follow_the_distribution(build: Build, model: Qwen3ForCausalLM):
    """First tokens of 2,000 responses against the model's probabilities, by a chi-squared statistic."""
    prompt = make_prompts([5])[0]
    sampling = SamplingParams(temperature=1.0, max_response_tokens=1)
    engine = build(max_concurrent_responses=2_000)
    responses = draw(engine, [prompt], 2_000, sampling)[0].responses
    model.eval()
    with torch.no_grad():
        logits_V = model(input_ids=torch.tensor(prompt.token_ids)[None]).logits[0, -1].double()
    expected_V = 2_000 * logits_V.softmax(dim=-1).numpy()
    counts_V = np.bincount([int(response.token_ids[0]) for response in responses], minlength=expected_V.size)
    # Rare tokens together make one class.
    is_rare_V = expected_V < 5
    expected = np.append(expected_V[~is_rare_V], expected_V[is_rare_V].sum())
    counts = np.append(counts_V[~is_rare_V], counts_V[is_rare_V].sum())
    freedom = expected.size - 1
    assert freedom > 20
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5


def test_temperature_zero_is_greedy_and_has_no_logprobs(build: Build, model: Qwen3ForCausalLM):
    prompt = make_prompts([11])[0]
    sampling = SamplingParams(temperature=0.0, max_response_tokens=6)
    first, second = draw(build(), [prompt], 2, sampling)[0].responses
    assert first.rollout_logprobs is None and first.token_ids.tolist() == second.token_ids.tolist()
    model.eval()
    ids = torch.tensor(prompt.token_ids)[None]
    with torch.no_grad():
        for token in first.token_ids:
            assert int(model(input_ids=ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_greedy_and_sampled_groups_share_a_batch(build: Build):
    greedy = SamplingParams(temperature=0.0, max_response_tokens=5)
    prompts = make_prompts([9, 21])
    engine = build()

    async def both():
        return await asyncio.gather(
            engine.generate(prompts[0], group_size=2, sampling=greedy, step=0),
            engine.generate(prompts[1], group_size=2, sampling=TRAINING, step=0),
        )

    evaluated, trained = asyncio.run(both())
    alone = draw(build(), [prompts[0]], 2, greedy)[0]
    assert [r.token_ids.tolist() for r in evaluated.responses] == [r.token_ids.tolist() for r in alone.responses]
    assert_same_group(trained, draw(build(), [prompts[1]], 2, TRAINING)[0])


def test_eos_ends_a_response_and_is_its_last_token(build: Build, model: Qwen3ForCausalLM):
    """Two EOS ids, as instruction-tuned models have them: either ends a response, and the budget ends the others."""
    assert model.generation_config is not None
    # Two common tokens of this model.
    model.generation_config.eos_token_id = [EOS, 60, 61]
    sampling = SamplingParams(temperature=1.5, max_response_tokens=40)
    groups = draw(build(max_concurrent_responses=40), make_prompts([5, 8]), 20, sampling)
    ends = set()
    for response in (response for group in groups for response in group.responses):
        tokens = response.token_ids.tolist()
        assert not set(tokens[:-1]) & {EOS, 60, 61}
        if response.finish_reason is FinishReason.EOS:
            ends.add(tokens[-1])
        else:
            assert response.finish_reason is FinishReason.LENGTH and response.is_truncated
            assert len(tokens) == 40 and tokens[-1] not in {EOS, 60, 61}
        assert "<eos>" not in response.text
    assert len(ends) >= 2


def test_a_stop_string_ends_a_response_where_its_text_first_holds_it(build: Build, tokenizer: PreTrainedTokenizerFast):
    """The text without a stop says where each string first appears; two strings, of two tokens each, come from it."""
    prompts = make_prompts([12, 30])
    plain = SamplingParams(temperature=1.0, max_response_tokens=30, seed=1)
    engine = build()
    free = draw(engine, prompts, 4, plain)
    letters = tokenizer.convert_ids_to_tokens(list(range(NUM_BYTES)))
    is_ascii = {index for index, letter in enumerate(letters) if letter.isascii() and letter.isprintable()}
    pairs = [
        text
        for group in free
        for response in group.responses
        for left, right in zip(response.token_ids[5:].tolist(), response.token_ids[6:].tolist(), strict=False)
        if left in is_ascii and right in is_ascii and (text := decode(tokenizer, [left, right]))
    ]
    stop = (pairs[0], pairs[-1])
    stopped = draw(engine, prompts, 4, SamplingParams(temperature=1.0, max_response_tokens=30, seed=1, stop=stop))
    num_stopped = 0
    for before, after in zip(free, stopped, strict=True):
        for whole, cut in zip(before.responses, after.responses, strict=True):
            tokens = whole.token_ids.tolist()
            texts = [decode(tokenizer, tokens[:end]) for end in range(1, len(tokens) + 1)]
            first = next((end for end, text in enumerate(texts, start=1) if any(s in text for s in stop)), None)
            if first is None:
                assert cut.token_ids.tolist() == tokens and cut.finish_reason is whole.finish_reason
                continue
            num_stopped += 1
            assert cut.finish_reason is FinishReason.STOP
            assert cut.token_ids.tolist() == tokens[:first]
            assert cut.text.endswith(stop) and cut.text == texts[first - 1]
    assert num_stopped >= 2


def test_the_global_generator_is_not_read_or_moved(build: Build):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    draw(build(), make_prompts([3, 20]), 2, TRAINING)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trainers_model_is_left_as_it_was(build: Build, model: Qwen3ForCausalLM):
    """transformers#45943, transformers#48294: mode, attention implementation, checkpointing, gradients, and memory."""
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    implementation = model.config._attn_implementation
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    storages = {parameter.data_ptr() for parameter in model.parameters()}
    engine = build()
    # Dropout would make these differ from an engine that evaluates.
    assert_same_group(draw(engine, make_prompts([9]), 2, TRAINING)[0], draw(engine, make_prompts([9]), 2, TRAINING)[0])
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == implementation
    assert len(gradients) == len(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, gradients[name])
    assert {parameter.data_ptr() for parameter in engine._twin.parameters()} == storages


def test_new_weights_draw_from_the_next_token_on(build: Build, model: Qwen3ForCausalLM):
    """No stale cache is used: the same prompt is drawn as by an engine that never saw the old weights. The optimizer
    writes in place; another trainer may put other Parameter objects in place, which are followed too (TRL#5312,
    TRL#5313)."""
    engine = build()
    prompts = make_prompts([40, 18])
    old = draw(engine, prompts, 3, TRAINING)
    assert all((r.policy_versions == 0).all() for group in old for r in group.responses)  # pyright: ignore
    other = tiny_qwen3(seed=5)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)
    asyncio.run(engine.update_weights({}, 7))
    assert engine.policy_version == 7
    drawn = draw(engine, prompts, 3, TRAINING)
    for group, fresh in zip(drawn, draw(build(of=other), prompts, 3, TRAINING), strict=True):
        assert_same_group(group, fresh)
        assert all((r.policy_versions == 7).all() for r in group.responses)  # pyright: ignore
    assert [r.token_ids.tolist() for r in drawn[0].responses] != [r.token_ids.tolist() for r in old[0].responses]
    replaced = torch.nn.Parameter(tiny_qwen3(seed=6).get_parameter(REPLACED).detach())
    for one in (model, other):
        module, _, leaf = REPLACED.rpartition(".")
        setattr(one.get_submodule(module), leaf, replaced)
    asyncio.run(engine.update_weights({}, 8))
    for group, fresh in zip(
        draw(engine, prompts, 3, TRAINING), draw(build(of=other), prompts, 3, TRAINING), strict=True
    ):
        assert_same_group(group, fresh)


def test_a_group_larger_than_the_engine_is_drawn_in_parts(build: Build):
    prompt = make_prompts([35])[0]
    whole = draw(build(), [prompt], 11, TRAINING)[0]
    assert_same_group(draw(build(max_concurrent_responses=4), [prompt], 11, TRAINING)[0], whole)
    # Room for 80 tokens: the prompt and two responses at a time.
    assert_same_group(draw(build(cache_tokens=160), [prompt], 11, TRAINING)[0], whole)


def test_a_long_prompt_is_read_in_pieces(build: Build, monkeypatch: pytest.MonkeyPatch):
    """Chunked prefill beside other requests changes nothing."""
    prompts = make_prompts([150, 3, 64, 97, 33])
    whole = draw(build(), prompts, 3, TRAINING)
    monkeypatch.setattr("ratoon.rollout.engines.continuous_batching.PREFILL_TOKENS", 32)
    for group, reference in zip(draw(build(max_concurrent_responses=24), prompts, 3, TRAINING), whole, strict=True):
        assert_same_group(group, reference)


def test_the_cache_holds_a_prompt_once_and_stays_under_its_cap(build: Build):
    engine = build(cache_tokens=512)
    prompts = make_prompts([100] * 6)
    most_in_use = 0
    forward = engine._batch._forward

    def watched() -> None:
        nonlocal most_in_use
        forward()
        processor = engine._batch._processor
        assert processor is not None
        most_in_use = max(most_in_use, engine._batch._num_blocks - processor.cache.get_num_free_blocks())

    engine._batch._forward = watched
    draw(engine, prompts, 8, SamplingParams(max_response_tokens=9))
    assert engine._batch._processor is not None
    # Two more blocks are the cache's own padding.
    assert engine._batch._processor.cache.key_cache[0].shape[0] == (512 // 16 + 2) * 16
    # Six whole blocks of the prompt once, and a block and a half for each response: replicated, it would be 8 * 7.
    assert 6 + 8 <= most_in_use <= 32
    assert engine._batch._processor.cache.get_num_free_blocks() == 512 // 16


def test_a_prompt_is_computed_once_for_its_group(build: Build, model: Qwen3ForCausalLM):
    engine = build()
    num_rows = 0

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal num_rows
        num_rows += args[0].shape[1]

    engine._twin.model.layers[0].mlp.register_forward_pre_hook(count)
    groups = draw(engine, make_prompts([50, 70]), 8, SamplingParams(max_response_tokens=5))
    # The last prompt token runs once for each response, and so does every response token but the last.
    num_responses_tokens = sum(sum(group.response_lengths) for group in groups)
    assert num_rows == 49 + 69 + num_responses_tokens


@pytest.mark.parametrize(
    ("prompt", "sampling", "settings", "message"),
    [
        (Prompt("big", np.ones(250, np.int64)), TRAINING, {}, r"'big' has 250 .* over the model's 256 positions"),
        (Prompt("id", np.array([EOS + 2])), TRAINING, {}, r"token id 258, but the model has 258 embeddings"),
        (
            Prompt("big", np.ones(130, np.int64)),
            TRAINING,
            {"cache_tokens": 128},
            r"'big' .* over rollout.cache_tokens=128",
        ),
    ],
)
def test_what_cannot_be_held_is_the_users_error(build: Build, prompt, sampling, settings, message):
    engine = build(**settings)
    with pytest.raises(UserError, match=message):
        draw(engine, [prompt], 2, sampling)
    draw(engine, make_prompts([3]), 1, TRAINING)
