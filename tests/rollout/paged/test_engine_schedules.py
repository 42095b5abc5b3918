"""Random schedules of calls to the engines, over a real model: what comes out is what plain generation gives."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.paged.test_model import SIZES, plainly_generated
from tests.rollout.tiny import byte_tokenizer, draw, make_prompts
from transformers import Qwen3Config, Qwen3ForCausalLM

from ratoon.rollout import RolloutConfig
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.rollout.engines.transformers import TransformersEngine
from ratoon.types import Response, RolloutGroup, SamplingParams

BLOCK_TOKENS = 4
GROUP_SIZE = 3
PROMPTS = make_prompts([1, 3, 4, 9, 14])
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_response_tokens=13),
    SamplingParams(temperature=0.9, top_p=0.9, max_response_tokens=13, seed=3),
)
MOVES = (*("call",) * 4, *("run",) * 4, "go on", "go on", "cancel", "abort", "pause", "resume", "update")


Move = tuple[str, int, int, int]


@st.composite
def schedules(draw: st.DrawFn) -> list[Move]:
    """Moves with three numbers each, from a seed: hypothesis prefers small ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = ["call", *draw(st.lists(st.sampled_from(MOVES), min_size=4, max_size=16))]
    return [(name, *map(int, rng.integers(0, 1_000, 3))) for name in names]  # pyright: ignore[reportReturnType]


@cache
def model() -> Qwen3ForCausalLM:
    """One layer in float64, with an EOS token that ends some greedy responses early."""
    torch.manual_seed(4)
    found = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_hidden_layers": 1})).double().eval()
    assert found.generation_config is not None
    found.generation_config.eos_token_id = plainly_generated(found, PROMPTS[2], 13)[5]
    return found


@cache
def undisturbed() -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """The groups of all prompts for each of `SAMPLINGS`; the greedy ones are those of plain generation."""
    engine = TransformersEngine(RolloutConfig(), model(), byte_tokenizer())
    greedy, sampled = (draw(engine, PROMPTS, GROUP_SIZE, sampling) for sampling in SAMPLINGS)
    asyncio.run(engine.close())
    for prompt, group in zip(PROMPTS, greedy, strict=True):
        tokens = plainly_generated(model(), prompt, 13)
        assert all(response.token_ids.tolist() == tokens for response in group.responses)
    lengths = {response.num_tokens for group in (*greedy, *sampled) for response in group.responses}
    assert 13 in lengths and min(lengths) < 13
    return greedy, sampled


@dataclass
class Calls:
    """Calls of one engine, and what became of each."""

    engine: InProcessEngine[Any]
    pending: dict[asyncio.Task[RolloutGroup], tuple[int, int]] = field(default_factory=dict[Any, tuple[int, int]])
    """With the prompt and the sampling of each."""

    ended: list[tuple[tuple[int, int], RolloutGroup]] = field(default_factory=list[Any])
    num_made: int = 0
    num_cancelled: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        step = self.engine._batch.step

        def counted() -> Any:
            self.num_steps += 1
            return step()

        self.engine._batch.step = counted

    def call(self, key: tuple[int, int], budget: int | None, begun: RolloutGroup | None = None) -> None:
        call = self.engine.generate(
            PROMPTS[key[0]],
            group_size=GROUP_SIZE,
            sampling=SAMPLINGS[key[1]],
            step=0,
            begun=begun,
            max_new_tokens=budget,
        )
        self.pending[asyncio.create_task(call)] = key
        self.num_made += 1

    def collect(self) -> None:
        for task in [task for task in self.pending if task.done()]:
            key = self.pending.pop(task)
            if task.cancelled():
                self.num_cancelled += 1
            else:
                self.ended.append((key, task.result()))

    async def run(self, num_steps: int) -> None:
        """Until so many steps are done, or nothing is left to do."""
        until = self.num_steps + num_steps
        await asyncio.sleep(0)
        while self.num_steps < until and self.engine._calls and not self.engine._is_paused:
            await asyncio.sleep(0.0002)
        self.collect()

    async def move(self, name: str, first: int, second: int, third: int) -> None:
        budget = None if third % 3 == 0 else 1 + third % 9
        if name == "call":
            self.call((first % len(PROMPTS), second % 2), budget)
        elif name == "go on" and self.ended:
            key, group = self.ended[first % len(self.ended)]
            self.call(key, budget, group)
        elif name == "cancel" and self.pending:
            list(self.pending)[first % len(self.pending)].cancel()
        elif name == "run":
            await self.run(1 + first % 12)
        elif name == "update":
            await self.engine.update_weights({}, self.engine.policy_version + 1)
        elif name in ("abort", "pause", "resume"):
            await getattr(self.engine, name)()
        await asyncio.sleep(0)

    async def go_on_with_all(self) -> None:
        for key, group in list(self.ended):
            self.call(key, None, group)
        await self.settle()

    async def settle(self) -> None:
        if self.pending:
            done, hanging = await asyncio.wait(self.pending, timeout=30)
            assert not hanging, f"{len(hanging)} calls do not end"
            assert len(done) == len(self.pending)
        self.collect()


def paged(max_concurrent: int, spare_blocks: int | None, prefill_tokens: int, restarts: bool) -> InProcessEngine[Any]:
    twin = twin_of(model(), BLOCK_ATTENTION)
    least = -(-14 // BLOCK_TOKENS) + -(-12 // BLOCK_TOKENS)
    cache_tokens = None if spare_blocks is None else (least + spare_blocks) * BLOCK_TOKENS
    runner = TorchRunner(twin, BLOCK_TOKENS)
    batch = PagedBatch(runner, max_concurrent, cache_tokens, restarts=restarts, prefill_tokens=prefill_tokens)
    return InProcessEngine(RolloutConfig(timeout_s=30), model(), byte_tokenizer(), twin, batch)


def stock(max_concurrent: int, spare_blocks: int | None, *_: object) -> InProcessEngine[Any]:
    cache_tokens = None if spare_blocks is None else 64 + 16 * spare_blocks
    config = RolloutConfig(max_concurrent_responses=max_concurrent, cache_tokens=cache_tokens, timeout_s=30)
    return TransformersEngine(config, model(), byte_tokenizer())


def check(key: tuple[int, int], response: Response, index: int) -> None:
    """Its tokens are the first ones of the undisturbed response, and all of them where it ended."""
    whole = undisturbed()[key[1]][key[0]].responses[index]
    R = response.num_tokens
    assert response.token_ids.tolist() == whole.token_ids[:R].tolist()
    assert response.can_go_on or response.finish_reason is whole.finish_reason
    assert (whole.num_tokens == R) == (not response.can_go_on)
    assert response.policy_versions is not None and (np.diff(response.policy_versions) >= 0).all()
    if whole.rollout_logprobs is not None:
        assert response.rollout_logprobs is not None
        np.testing.assert_allclose(response.rollout_logprobs, whole.rollout_logprobs[:R], rtol=0, atol=1e-5)
    if whole.support is not None and R:
        assert response.support is not None
        assert response.support.token_ids.tolist() == whole.support.part(0, R).token_ids.tolist()


async def run_schedule(engine: InProcessEngine[Any], schedule: list[Move]) -> None:
    calls = Calls(engine)
    for name, *numbers in schedule:
        await calls.move(name, *numbers)
    await engine.resume()
    await calls.settle()
    assert len(calls.ended) + calls.num_cancelled == calls.num_made, "a call has ended twice or not at all"
    num_stopped = len(calls.ended)
    await calls.go_on_with_all()
    assert len(calls.ended) == 2 * num_stopped
    for number, (key, group) in enumerate(calls.ended):
        assert group.prompt is PROMPTS[key[0]] and group.group_size == GROUP_SIZE
        assert number < num_stopped or not any(response.can_go_on for response in group.responses)
        for index, response in enumerate(group.responses):
            check(key, response, index)
    await engine.pause()  # the worker has done all that it was told
    assert engine._batch.num_running == 0 and not engine._calls
    if isinstance(engine._batch, PagedBatch):
        assert engine._batch.num_free_blocks == engine._batch.num_blocks
        assert not engine._batch._families and not engine._batch._waiting
    else:
        processor = engine._batch._processor
        assert processor is None or processor.cache.get_num_free_blocks() == engine._batch._num_blocks
        assert not engine._batch._shares and not engine._batch._waiting


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("build_engine", "num_schedules"),
    [
        (paged, 15),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((paged, 1_000), (stock, 8), (stock, 200))),
    ],
)
def test_any_schedule_ends_every_call_once_with_its_own_tokens(build_engine: Any, num_schedules: int):
    """Calls that wait for slots and blocks, are pre-empted, cancelled and aborted, stop at budgets and go on, pauses,
    and weights that are called new: greedy tokens are those of plain `generate`, every block comes back."""

    undisturbed()  # it has an event loop of its own

    @settings(max_examples=num_schedules, deadline=None)
    @given(
        max_concurrent=st.integers(1, 7),
        spare_blocks=st.none() | st.integers(0, 8),
        prefill_tokens=st.integers(3, 30),
        restarts=st.booleans(),
        schedule=schedules(),
    )
    def check_schedule(
        max_concurrent: int,
        spare_blocks: int | None,
        prefill_tokens: int,
        restarts: bool,
        schedule: list[Move],
    ) -> None:
        engine = build_engine(max_concurrent, spare_blocks, prefill_tokens, restarts)
        try:
            asyncio.run(run_schedule(engine, schedule))
        finally:
            asyncio.run(engine.close())

    check_schedule()
