"""vLLM itself, on a CPU, in an environment of its own (`make test-vllm`): a tiny model with tied weights."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from tests.rollout.tiny import EOS, VOCAB, byte_tokenizer, make_prompts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ratoon.layout import pack_documents, pack_groups
from ratoon.models import attach, forward_logprobs
from ratoon.rollout import RolloutConfig, build_engine
from ratoon.rollout.engines.vllm.engine import VllmEngine
from ratoon.rollout.policy_weights import policy_stream
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams
from ratoon.weight_sync import (
    CheckpointNames,
    ProbeScores,
    WeightStream,
    WeightSyncError,
    probe_tokens,
    publish,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

CONFIG = RolloutConfig(engine="vllm", temperature=0.7, max_response_tokens=12)
TOKENS = probe_tokens(byte_tokenizer(), VOCAB)


def tiny_llama() -> LlamaForCausalLM:
    """Heads of 32, the least that vLLM has on a CPU; the embedding is the output head too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=EOS,
        pad_token_id=EOS + 1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return attach(tiny_llama())


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VllmEngine]:
    """One for all tests: vLLM does not start twice in a process without leftovers."""
    before = torch.random.get_rng_state()
    engine = build_engine(CONFIG, model, byte_tokenizer())
    assert isinstance(engine, VllmEngine)
    assert torch.equal(torch.random.get_rng_state(), before), "starting vLLM moved the trainer's generator"
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(autouse=True)
def _same_weights(model: PreTrainedModel, engine: VllmEngine) -> None:
    """Whatever the test before sent."""
    asyncio.run(publish(policy_stream(model, model.dtype), 0, [engine], timeout_s=60.0))


def move(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def trainer_scores(model: PreTrainedModel, version: int) -> ProbeScores:
    with torch.no_grad():
        logprobs_M, _ = forward_logprobs(model, pack_documents([TOKENS.tolist()]))
    return ProbeScores(version, logprobs_M.double().numpy())


async def draw(
    engine: VllmEngine, prompts: Sequence[Prompt], sampling: SamplingParams, *, group_size: int = 4
) -> list[RolloutGroup]:
    calls = [engine.generate(prompt, group_size=group_size, sampling=sampling, step=0) for prompt in prompts]
    return list(await asyncio.gather(*calls))


def gap(model: PreTrainedModel, groups: Sequence[RolloutGroup], temperature: float) -> float:
    with torch.no_grad():
        logprobs_M, _ = forward_logprobs(model, pack_groups(list(groups)), temperature)
    parts = [r.rollout_logprobs for group in groups for r in group.responses if r.rollout_logprobs is not None]
    return float(np.abs(logprobs_M.numpy() - np.concatenate(parts)).max())


def test_logprobs_are_the_trainers_at_the_sampling_temperature_after_every_update(
    model: PreTrainedModel, engine: VllmEngine
):
    """TRL#4159: a temperature other than 1 was applied on one side only. SkyRL#1680, sglang#14178: weights in several,
    or small, pieces were loaded wrongly; here each tensor is a piece. An output head tied to the embedding must follow.
    """

    async def run() -> None:
        for version in (1, 2, 3):
            move(model)
            engine._bucket_bytes = 1
            await publish(policy_stream(model, model.dtype), version, [engine], timeout_s=60.0)
            engine.probe.check(ProbeScores(version, await engine.score(TOKENS)), trainer_scores(model, version))
            groups = await draw(engine, make_prompts([3, 20, 140]), CONFIG.sampling_params(seed=version))
            assert gap(model, groups, 0.7) < 2e-4
            versions = {v for g in groups for r in g.responses for v in np.asarray(r.policy_versions).tolist()}
            assert versions == {version}

    asyncio.run(run())


def test_prompts_longer_together_than_a_pass(model: PreTrainedModel, engine: VllmEngine):
    """vLLM failed with "CPU Generator does not use offset" where a pass had room for a part of a prompt only."""
    groups = asyncio.run(draw(engine, make_prompts([450] * 24), CONFIG.sampling_params(seed=0), group_size=2))
    assert [len(group.responses) for group in groups] == [2] * 24
    assert gap(model, groups, 0.7) < 2e-4


def test_one_broken_tensor_trips_the_probe_with_a_cause(model: PreTrainedModel, engine: VllmEngine):
    """verl#7904, verl#6813, verl#7083: corrupt weights after a sync, which nothing noticed."""
    parameters = dict(model.named_parameters())
    broken = "model.layers.1.self_attn.o_proj.weight"

    def value(name: str) -> Tensor:
        tensor = parameters[name].detach()
        return tensor.flip(0) if name == broken else tensor

    async def run() -> None:
        move(model)
        engine.probe.check(ProbeScores(1, await engine.score(TOKENS)), ProbeScores(1, await engine.score(TOKENS)))
        await publish(WeightStream(CheckpointNames.of(model), value), 2, [engine], timeout_s=60.0)
        with pytest.raises(WeightSyncError, match="some weights did not arrive, or not where they belong"):
            engine.probe.check(ProbeScores(2, await engine.score(TOKENS)), trainer_scores(model, 2))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj"),  # fused with two that come
    ],
)
def test_a_missing_tensor_is_named(model: PreTrainedModel, engine: VllmEngine, lost: str, named: str):
    names = CheckpointNames.of(model)
    fewer = CheckpointNames(
        model=model,
        of_parameter={name: parts for name, parts in names.of_parameter.items() if name != lost},
        shapes={name: shape for name, shape in names.shapes.items() if name != lost},
    )
    stream = WeightStream(fewer, lambda name: model.get_parameter(name).detach())
    with pytest.raises(WeightSyncError, match=named):
        asyncio.run(publish(stream, 1, [engine], timeout_s=60.0))


def test_an_unknown_tensor_is_named_and_the_next_update_is_well(model: PreTrainedModel, engine: VllmEngine):
    """TRL#5892: after a transfer that raised, the session was never finished and the engine was left half loaded."""
    names = CheckpointNames.of(model)
    more = CheckpointNames(
        model=model,
        of_parameter={**names.of_parameter, "model.layers.7.strange": ("model.layers.7.strange",)},
        shapes={**names.shapes, "model.layers.7.strange": torch.Size([2])},
    )

    class Strange(WeightStream):
        def __getitem__(self, name: str) -> Tensor:
            return torch.zeros(2) if "strange" in name else super().__getitem__(name)

    stream = Strange(more, lambda name: model.get_parameter(name).detach())
    with pytest.raises(WeightSyncError, match=r"vLLM refused weights of version 1 .*layers\.7"):
        asyncio.run(publish(stream, 1, [engine], timeout_s=60.0))

    async def recover() -> None:
        await publish(policy_stream(model, model.dtype), 2, [engine], timeout_s=60.0)
        engine.probe.check(ProbeScores(2, await engine.score(TOKENS)), trainer_scores(model, 2))

    asyncio.run(recover())


def test_a_groups_prompt_is_computed_once(engine: VllmEngine):
    batch = engine._batch
    before = batch.num_prompt_tokens, batch.num_reused_tokens
    asyncio.run(draw(engine, make_prompts([300], seed=5), CONFIG.sampling_params(seed=0), group_size=8))
    asked, reused = batch.num_prompt_tokens - before[0], batch.num_reused_tokens - before[1]
    assert asked == 8 * 300
    assert reused == 7 * 256, "whole blocks of 128 tokens, for all but the first"


def test_draws_depend_on_the_response_and_not_on_its_batch(engine: VllmEngine):
    first, second = make_prompts([9, 30])
    sampling = CONFIG.sampling_params(seed=4)

    async def run() -> tuple[RolloutGroup, RolloutGroup]:
        (alone,) = await draw(engine, [first], sampling)
        beside = await draw(engine, [second, first], sampling)
        return alone, beside[1]

    for left, right in zip(*(group.responses for group in asyncio.run(run())), strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()


def test_weights_that_change_under_way_are_stamped_and_scored_as_they_were(model: PreTrainedModel, engine: VllmEngine):
    """Of each response the tokens behind the update are those of the new weights, over keys computed with them."""
    sampling = SamplingParams(temperature=0.7, max_response_tokens=60, seed=2)
    (prompt,) = make_prompts([20])

    async def run() -> RolloutGroup:
        call = asyncio.create_task(engine.generate(prompt, group_size=3, sampling=sampling, step=0))
        while not any(draft.num_tokens > 9 for draft in (c.draft for c in engine._calls.values())):
            await asyncio.sleep(0.001)
        await engine.pause()
        move(model)
        await publish(policy_stream(model, model.dtype), 1, [engine], timeout_s=60.0)
        await engine.resume()
        return await call

    group = asyncio.run(run())
    with torch.no_grad():
        logprobs_M, _ = forward_logprobs(model, pack_groups([group]), 0.7)
    start, num_new = 0, 0
    for response in group.responses:
        versions = np.asarray(response.policy_versions)
        assert (np.diff(versions) >= 0).all() and versions[0] == 0
        new = versions == 1
        num_new += int(new.sum())
        own = logprobs_M[start : start + response.num_tokens].numpy()
        assert response.rollout_logprobs is not None
        np.testing.assert_allclose(response.rollout_logprobs[new], own[new], atol=2e-4)
        start += response.num_tokens
    assert num_new > 10


def test_an_abort_hands_out_what_there_is(engine: VllmEngine):
    sampling = SamplingParams(temperature=0.7, max_response_tokens=400, seed=2)
    (prompt,) = make_prompts([20])

    async def run() -> RolloutGroup:
        call = asyncio.create_task(engine.generate(prompt, group_size=3, sampling=sampling, step=0))
        while not any(c.draft.num_tokens > 9 for c in engine._calls.values()):
            await asyncio.sleep(0.001)
        await engine.abort()
        return await call

    group = asyncio.run(run())
    ends = {response.finish_reason for response in group.responses}
    assert FinishReason.ABORT in ends and all(response.num_tokens for response in group.responses)
    assert not engine._core.has_unfinished


def test_greedy_is_the_likeliest_token(model: PreTrainedModel, engine: VllmEngine):
    (prompt,) = make_prompts([20])
    sampling = SamplingParams(temperature=0.0, max_response_tokens=8)
    (group,) = asyncio.run(draw(engine, [prompt], sampling, group_size=1))
    tokens = prompt.token_ids.tolist()
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for token in group.responses[0].token_ids.tolist():
            assert int(plain(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)


def test_a_response_goes_on_in_a_later_call(model: PreTrainedModel, engine: VllmEngine):
    (prompt,) = make_prompts([20])
    sampling = SamplingParams(temperature=0.7, max_response_tokens=12, seed=8)

    async def run() -> RolloutGroup:
        begun = await engine.generate(prompt, group_size=3, sampling=sampling, step=0, max_new_tokens=5)
        assert all(r.num_tokens <= 5 for r in begun.responses)
        return await engine.generate(prompt, group_size=3, sampling=sampling, step=1, begun=begun)

    group = asyncio.run(run())
    assert any(response.num_tokens == 12 for response in group.responses)
    assert gap(model, [group], 0.7) < 2e-4
