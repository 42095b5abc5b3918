"""The paged engine and the trainer on a batch-invariant model: the same bits for every token."""

# Shape letters: M scored tokens.

import asyncio
import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import EOS, VOCAB, byte_tokenizer, draw, make_prompts
from tests.sampling import sampled
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ratoon.layout import pack_groups
from ratoon.models import attach, forward_logprobs
from ratoon.models.interface import is_batch_invariant
from ratoon.rollout import RolloutConfig, build_engine
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.engine import PagedEngine
from ratoon.rollout.engines.paged.kernel_runner import KernelRunner
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.rollout.engines.stepping import StepReport
from ratoon.types import Prompt, RolloutGroup, SamplingParams, UserError

ON_GPU = pytest.mark.gpu
RUNS = [
    pytest.param("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=ON_GPU),
    pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
]

LONG_RUNS = [pytest.param("cpu", torch.float32, marks=pytest.mark.full), *RUNS[1:]]

# Widths are multiples of 32: torch computes the last few numbers of a tensor one by one on a CPU, in other roundings.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
    "pad_token_id": EOS + 1,
    "bos_token_id": None,
}


def tiny(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """One of its own: attaching takes seconds in the interpreter."""
    return copy.deepcopy(attached(name, device, dtype))


@cache
def attached(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """`llama`: three query heads of a key head. `qwen3`: norms of queries and keys, and a window in the first layer."""
    torch.manual_seed(1)
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1))
    else:
        layer_types = ["sliding_attention", "full_attention"]
        model = Qwen3ForCausalLM(
            Qwen3Config(
                **SIZES, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=21,
                layer_types=layer_types,
            )
        )  # fmt: skip
    model.to(device=torch.device(device), dtype=dtype)  # pyright: ignore[reportCallIssue]
    return attach(model.eval(), batch_invariant=True)


ENGINES: list[InProcessEngine[PagedBatch]] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while ENGINES:
        asyncio.run(ENGINES.pop().close())


def engine_of(
    model: PreTrainedModel, *, slots: int = 7, cache_tokens: int | None = None, prefill_tokens: int | None = None
) -> InProcessEngine[PagedBatch]:
    config = RolloutConfig(engine="paged", max_concurrent_responses=slots, cache_tokens=cache_tokens)
    if prefill_tokens is None:
        engine = PagedEngine(config, model, byte_tokenizer())
    else:
        from ratoon.ops.invariant.entry import score_tokens

        twin = twin_of(model, BLOCK_ATTENTION)
        runner = KernelRunner(twin, slots, steps_together=3)
        batch = PagedBatch(runner, slots, cache_tokens, prefill_tokens=prefill_tokens, score=score_tokens)
        engine = InProcessEngine(config, model, byte_tokenizer(), twin, batch)
    ENGINES.append(engine)
    return engine


def rollout_logprobs(groups: Sequence[RolloutGroup]) -> torch.Tensor:
    found = [response.rollout_logprobs for group in groups for response in group.responses]
    return torch.from_numpy(np.concatenate([logprobs for logprobs in found if logprobs is not None]))


def assert_same_bits(model: PreTrainedModel, groups: Sequence[RolloutGroup], temperature: float) -> None:
    """In one pack, and each group in one of its own."""
    with torch.no_grad():
        together_M = forward_logprobs(model, pack_groups(groups), temperature)[0].cpu()
        alone_M = torch.cat([forward_logprobs(model, pack_groups([group]), temperature)[0].cpu() for group in groups])
    drawn_M = rollout_logprobs(groups)
    assert drawn_M.shape == together_M.shape and drawn_M.dtype == together_M.dtype == torch.float32
    assert (drawn_M < 0).all() and drawn_M.unique().numel() > drawn_M.numel() // 2, "log-probs that say little"
    assert torch.equal(drawn_M, together_M), f"out by up to {float((drawn_M - together_M).abs().max())}"
    assert torch.equal(drawn_M, alone_M)


@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("name", sampled("qwen3", "llama"))
def test_engine_and_trainer_agree_bit_by_bit(name: str, device: str, dtype: torch.dtype):
    """Prompts around a tile and a block of keys; a second rollout under other weights."""
    model = tiny(name, device, dtype)
    lengths, most = ([1, 70], 4) if device == "cpu" else ([1, 16, 63, 64, 65, 200], 90)
    prompts = make_prompts(lengths)
    engine = engine_of(model)
    sampling = SamplingParams(temperature=0.7, max_response_tokens=most, seed=4)
    before = draw(engine, prompts, 2, sampling)
    assert_same_bits(model, before, 0.7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.update_weights({}, 1))
    after = draw(engine, prompts, 2, sampling)
    assert_same_bits(model, after, 0.7)
    assert not torch.equal(rollout_logprobs(before)[:5], rollout_logprobs(after)[:5])


@pytest.mark.parametrize(("device", "dtype"), LONG_RUNS)
def test_prompts_in_pieces_and_responses_that_gave_way(device: str, dtype: torch.dtype):
    """Room for little more than one response, prompts read 27 tokens at a time, steps of three tokens."""
    model = tiny("qwen3", device, dtype)
    lengths, most = ([70, 5], 6) if device == "cpu" else ([70, 5, 130, 64], 150)
    prompts = make_prompts(lengths)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [-1]  # all grow to their longest
    sampling = SamplingParams(temperature=1.3, max_response_tokens=most, seed=2)
    longest_blocks = -(-max(lengths) // 64) + -(-(most + 3) // 64)
    engine = engine_of(model, slots=3, cache_tokens=64 * (longest_blocks + 1), prefill_tokens=27)
    preempted: list[int] = []
    preempt = engine._batch._preempt

    def count(requests: Sequence[object]) -> None:
        preempted.extend([1] * len(requests))
        preempt(requests)  # pyright: ignore[reportArgumentType]

    engine._batch._preempt = count  # pyright: ignore[reportAttributeAccessIssue]
    step = engine._batch.step

    def stepping() -> StepReport:
        """On a CPU, where nobody waits until a block is full, the youngest gives way once."""
        report, seated = step(), engine._batch._seated
        if device == "cpu" and not preempted and len(seated) > 1 and len(seated[-1].draft.token_ids) > 1:
            engine._batch._preempt([max(seated, key=lambda request: request.order)])
        return report

    engine._batch.step = stepping  # pyright: ignore[reportAttributeAccessIssue]
    groups = draw(engine, prompts, 2, sampling)
    assert preempted, "no response gave way: the test shows nothing"
    assert_same_bits(model, groups, 1.3)


@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cpu", torch.float32, marks=pytest.mark.full), *RUNS[1:]])
def test_a_response_that_is_continued(device: str, dtype: torch.dtype):
    model = tiny("llama", device, dtype)
    prompt, engine = make_prompts([20])[0], engine_of(model)
    sampling = SamplingParams(temperature=1.0, max_response_tokens=7 if device == "cpu" else 100, seed=3)

    async def run() -> RolloutGroup:
        part = await engine.generate(prompt, group_size=2, sampling=sampling, step=0, max_new_tokens=4)
        return await engine.generate(prompt, group_size=2, sampling=sampling, step=0, begun=part)

    assert_same_bits(model, [asyncio.run(run())], 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_at_the_size_of_smollm2_and_at_another_concurrency(dtype: torch.dtype):
    """9 query heads, 3 key heads, 30 layers, random weights: 64 responses of 128 tokens to prompts of 512."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=49_151,
        pad_token_id=49_150,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]
    attach(model, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"p{index}", rng.integers(0, 49_000, 512)) for index in range(8)]
    sampling = SamplingParams(temperature=0.9, max_response_tokens=128, seed=0)
    groups = draw(engine_of(model, slots=64), prompts, 8, sampling)
    assert_same_bits(model, groups, 0.9)
    fewer = draw(engine_of(model, slots=11), prompts[:3], 8, sampling)
    for left, right in zip(groups, fewer, strict=False):
        for a, b in zip(left.responses, right.responses, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.rollout_logprobs is not None and b.rollout_logprobs is not None
            assert a.rollout_logprobs.tobytes() == b.rollout_logprobs.tobytes()


@pytest.mark.full
def test_draws_do_not_depend_on_company():
    model = tiny("llama", "cpu", torch.float32)
    prompts = make_prompts([20, 3])
    sampling = SamplingParams(temperature=1.0, max_response_tokens=3, seed=4)
    both = draw(engine_of(model), prompts, 2, sampling)
    alone = draw(engine_of(model, slots=1), prompts[:1], 2, sampling)
    assert rollout_logprobs(both[:1]).numpy().tobytes() == rollout_logprobs(alone).numpy().tobytes()


def test_other_engines_and_cut_distributions_are_refused():
    model = tiny("llama", "cpu", torch.float32)
    assert is_batch_invariant(model)
    with pytest.raises(UserError, match=r'needs rollout.engine = "paged".*it is "transformers"'):
        build_engine(RolloutConfig(engine="transformers"), model, byte_tokenizer())
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(UserError, match=rf"rollout.{next(iter(cut))} = .* cuts it"):
            build_engine(RolloutConfig(engine="paged", **cut), model, byte_tokenizer())  # pyright: ignore[reportArgumentType]
