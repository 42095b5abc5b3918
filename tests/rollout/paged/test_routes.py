"""The experts that routers chose, as responses carry them: those of one plain pass over prompt and response."""

# Shape letters: P prompt tokens, R response tokens, L layers, K experts per token.

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.rollout.paged.moe import deepseek_v3, gpt_oss, in_float64, mixtral, plain_routes, qwen3_moe
from tests.rollout.tiny import byte_tokenizer, draw, make_prompts, tiny_qwen3
from transformers import PreTrainedModel

from ratoon.rollout import RolloutConfig, build_engine
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.engines.paged.block_attention import BLOCK_ATTENTION
from ratoon.rollout.engines.paged.experts import RouteRecorder, experts_of_layers, why_not_recorded
from ratoon.rollout.engines.paged.torch_runner import TorchRunner
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.types import Prompt, Response, RolloutGroup, SamplingParams, UserError

CONFIG = RolloutConfig(engine="paged", return_routed_experts=True, timeout_s=30)
PROMPTS = make_prompts([1, 3, 4, 9, 14])
SAMPLINGS = (
    SamplingParams(temperature=1.0, max_response_tokens=11, seed=3),
    SamplingParams(temperature=0.9, top_p=0.9, max_response_tokens=11, seed=4),
)
BLOCK_TOKENS = 4
GROUP_SIZE = 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_blocks(
    model: PreTrainedModel,
    *,
    max_concurrent: int = 7,
    spare_blocks: int | None = None,
    prefill_tokens: int = 16,
    restarts: bool = False,
) -> InProcessEngine[PagedBatch]:
    """An engine that crosses a block every four tokens, and reads prompts in pieces."""
    twin = twin_of(model, BLOCK_ATTENTION)
    least = -(-14 // BLOCK_TOKENS) + -(-10 // BLOCK_TOKENS)
    cache_tokens = None if spare_blocks is None else (least + spare_blocks) * BLOCK_TOKENS
    runner = TorchRunner(twin, BLOCK_TOKENS, returns_routes=True)
    batch = PagedBatch(runner, max_concurrent, cache_tokens, restarts=restarts, prefill_tokens=prefill_tokens)
    return InProcessEngine(CONFIG, model, byte_tokenizer(), twin, batch)


def assert_routes_are_plain(
    model: PreTrainedModel, prompt: Prompt, response: Response, plain: Callable[..., NDArray[np.int64]] = plain_routes
) -> None:
    P, R = prompt.num_tokens, response.num_tokens
    if R == 0:
        assert response.routed_experts is None
        return
    assert response.routed_experts is not None and response.routed_experts.shape[0] == P + R
    want_TLK = plain(model, [*prompt.token_ids, *response.token_ids])
    # The model never read the last token.
    np.testing.assert_array_equal(response.routed_experts[:-1], want_TLK[:-1])
    assert (response.routed_experts[-1] == -1).all()


Move = tuple[str, int, int]
MOVES = ("call", "call", "run", "run", "run", "update", "abort", "cancel", "go on")


async def run_schedule(engine: InProcessEngine[Any], moves: list[Move]) -> list[tuple[Prompt, RolloutGroup]]:
    """What became of every call, those included that went on from it."""
    pending: dict[asyncio.Task[RolloutGroup], tuple[Prompt, SamplingParams]] = {}
    ended: list[tuple[Prompt, SamplingParams, RolloutGroup]] = []

    def call(prompt: Prompt, sampling: SamplingParams, budget: int | None, begun: RolloutGroup | None = None) -> None:
        made = engine.generate(
            prompt, group_size=GROUP_SIZE, sampling=sampling, step=0, begun=begun, max_new_tokens=budget
        )
        pending[asyncio.create_task(made)] = prompt, sampling

    def collect() -> None:
        for task in [task for task in pending if task.done()]:
            prompt, sampling = pending.pop(task)
            if not task.cancelled():
                ended.append((prompt, sampling, task.result()))

    for name, first, second in moves:
        if name == "call":
            budget = None if second % 3 == 0 else 1 + second % 5
            call(PROMPTS[first % len(PROMPTS)], SAMPLINGS[second % 2], budget)
        elif name == "go on" and ended:
            prompt, sampling, group = ended[first % len(ended)]
            call(prompt, sampling, None if second % 2 else 1 + second % 5, group)
        elif name == "update":
            await engine.update_weights({}, engine.policy_version + 1)
        elif name == "abort":
            await engine.abort()
        elif name == "cancel" and pending:
            list(pending)[first % len(pending)].cancel()
        elif name == "run":
            await asyncio.sleep(0.002 * (1 + first % 4))
        await asyncio.sleep(0)
        collect()
    if pending:
        await asyncio.wait(pending, timeout=30)
    collect()
    assert not pending, "a call does not end"
    for prompt, sampling, group in list(ended):
        call(prompt, sampling, None, group)
    if pending:
        await asyncio.wait(pending, timeout=30)
    collect()
    return [(prompt, group) for prompt, _, group in ended]


@st.composite
def schedules(draw: st.DrawFn) -> list[Move]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = ["call", "call", *draw(st.lists(st.sampled_from(MOVES), min_size=4, max_size=14))]
    return [(name, *map(int, rng.integers(0, 1_000, 2))) for name in names]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("make", "num_schedules"),
    [
        (mixtral, 10),
        (qwen3_moe, 10),
        *(pytest.param(make, 200, marks=pytest.mark.full) for make in (mixtral, qwen3_moe)),
    ],
)
def test_any_schedule_gives_the_routes_of_a_plain_pass(make: Callable[[], PreTrainedModel], num_schedules: int):
    """Responses that wait, are pre-empted, aborted, stopped at budgets and taken further, under weights that are called
    new: in float64 no route depends on the company.

    verl#6046: routes concatenated twice where a partial rollout goes on. verl#6089: more routes than tokens where a
    response is cut. slime#1145, slime#1909: an engine returned no routes.
    """

    @settings(max_examples=num_schedules, deadline=None)
    @given(
        max_concurrent=st.integers(1, 7),
        spare_blocks=st.none() | st.integers(0, 8),
        prefill_tokens=st.integers(3, 30),
        restarts=st.booleans(),
        moves=schedules(),
    )
    def check(
        max_concurrent: int, spare_blocks: int | None, prefill_tokens: int, restarts: bool, moves: list[Move]
    ) -> None:
        engine = small_blocks(
            make(),
            max_concurrent=max_concurrent,
            spare_blocks=spare_blocks,
            prefill_tokens=prefill_tokens,
            restarts=restarts,
        )
        try:
            ended = asyncio.run(run_schedule(engine, moves))
        finally:
            asyncio.run(engine.close())
        for prompt, group in ended:
            for response in group.responses:
                assert_routes_are_plain(make(), prompt, response)

    check()


@pytest.mark.parametrize("restarts", [False, True])
def test_tokens_keep_the_routes_of_the_weights_that_drew_them(restarts: bool):
    """Also where other weights compute their keys again (miles#3277: there, routes of the recomputation went with
    log-probs of the first computation)."""
    prompt, sampling = PROMPTS[3], SAMPLINGS[0]
    model = qwen3_moe()
    router = model.model.layers[0].mlp.gate.weight
    before = router.detach().clone()
    engine = small_blocks(model, restarts=restarts)

    async def generate(begun: RolloutGroup | None, budget: int | None) -> RolloutGroup:
        return await engine.generate(
            prompt, group_size=2, sampling=sampling, step=0, begun=begun, max_new_tokens=budget
        )

    try:
        part = asyncio.run(generate(None, 4))
        with torch.no_grad():
            router.neg_()  # whatever was chosen is now the last choice
        asyncio.run(engine.update_weights({}, 1))
        whole = asyncio.run(generate(part, None))
        new = [plain_routes(model, [*prompt.token_ids, *response.token_ids]) for response in whole.responses]
    finally:
        with torch.no_grad():
            router.copy_(before)
        asyncio.run(engine.close())
    for first, response, new_TLK in zip(part.responses, whole.responses, new, strict=True):
        assert first.can_go_on and response.num_tokens > 4
        assert first.routed_experts is not None and response.routed_experts is not None
        num_old = prompt.num_tokens + 3
        old_TLK = plain_routes(model, [*prompt.token_ids, *first.token_ids])
        np.testing.assert_array_equal(response.routed_experts[:num_old], old_TLK[:num_old])
        # The first layer's router reads what no router has changed.
        np.testing.assert_array_equal(response.routed_experts[num_old:-1, 0], new_TLK[num_old:-1, 0])
        assert not (np.sort(old_TLK[:num_old, 0]) == np.sort(new_TLK[:num_old, 0])).all(axis=-1).any()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("spare_blocks", [None, 2])
def test_routes_are_of_the_pass_that_drew_the_next_token(restarts: bool, spare_blocks: int | None):
    """Under an update in flight, with and without room for all: as the version of the token behind each says. In the
    first layer, whose router reads what no router has changed."""
    prompt, sampling = PROMPTS[4], SAMPLINGS[0]
    model = qwen3_moe()
    router = model.model.layers[0].mlp.gate.weight
    before = router.detach().clone()
    engine = small_blocks(model, spare_blocks=spare_blocks, max_concurrent=3, restarts=restarts)
    num_steps = count_steps(engine)

    async def generate() -> RolloutGroup:
        made = asyncio.create_task(engine.generate(prompt, group_size=5, sampling=sampling, step=0))
        while len(num_steps) < 6:
            await asyncio.sleep(0)
        await engine.pause()
        with torch.no_grad():
            router.neg_()  # whatever was chosen is now the last choice
        await engine.update_weights({}, 1)
        await engine.resume()
        return await made

    try:
        group = asyncio.run(generate())
        sequences = [[*prompt.token_ids, *response.token_ids] for response in group.responses]
        plain = {1: [plain_routes(model, sequence)[:, 0] for sequence in sequences]}
    finally:
        with torch.no_grad():
            router.copy_(before)
        asyncio.run(engine.close())
    plain[0] = [plain_routes(model, sequence)[:, 0] for sequence in sequences]
    seen: set[tuple[int, ...]] = set()
    for index, response in enumerate(group.responses):
        versions = response.policy_versions
        assert versions is not None and response.routed_experts is not None
        seen.add(tuple(np.unique(versions)))
        # The whole prompt is of the pass that drew the first token.
        version_T = np.concatenate([np.repeat(versions[0], prompt.num_tokens), versions[1:]])
        assert not (plain[0][index] == plain[1][index]).all(axis=1).any()
        want_TK = np.where(version_T[:, None] == 0, plain[0][index][:-1], plain[1][index][:-1])
        np.testing.assert_array_equal(response.routed_experts[:-1, 0], want_TK)
    assert {(0, 1), (1,)} <= seen, "no response was in flight, or none began after the update"


def count_steps(engine: InProcessEngine[PagedBatch]) -> list[None]:
    """Grows by one with each step of the batch."""
    steps: list[None] = []
    step = engine._batch.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine._batch.step = counted
    return steps


def test_a_running_group_holds_its_prompts_routes_once():
    """slime#2384: the host's memory ran out by routes."""
    engine = small_blocks(mixtral())
    held: list[int] = []
    step = engine._batch.step

    def watched() -> Any:
        report = step()
        begun = [request for request in engine._batch._seated if request.draft.routes]
        held.append(len({id(request.draft.routes[0]) for request in begun}))
        assert not any(request.prompt is not None and request.prompt.routes for request in begun), "on the device still"
        return report

    engine._batch.step = watched
    try:
        draw(engine, [PROMPTS[4]], 5, SAMPLINGS[0])
    finally:
        asyncio.run(engine.close())
    assert max(held) == 1


def test_the_engine_of_a_recipe_returns_them():
    model = in_float64(gpt_oss())
    engine = build_engine(CONFIG, model, byte_tokenizer())
    try:
        (group,) = draw(engine, [PROMPTS[3]], 2, SAMPLINGS[0])
    finally:
        asyncio.run(engine.close())
    for response in group.responses:
        assert_routes_are_plain(model, PROMPTS[3], response)


def test_without_the_key_there_are_none():
    engine = build_engine(RolloutConfig(engine="paged"), mixtral(), byte_tokenizer())
    try:
        (group,) = draw(engine, [PROMPTS[1]], 2, SAMPLINGS[0])
    finally:
        asyncio.run(engine.close())
    assert all(response.routed_experts is None for response in group.responses)


def test_a_begun_group_without_its_routes_is_refused():
    engine = small_blocks(mixtral())

    async def generate(begun: RolloutGroup | None) -> RolloutGroup:
        return await engine.generate(
            PROMPTS[3], group_size=1, sampling=SAMPLINGS[0], step=0, begun=begun, max_new_tokens=3
        )

    try:
        group = asyncio.run(generate(None))
        bare = replace(group, responses=(replace(group.responses[0], routed_experts=None),))
        with pytest.raises(ValueError, match="response 0 has no routed_experts, which"):
            asyncio.run(generate(bare))
    finally:
        asyncio.run(engine.close())


def test_a_dense_model_is_refused():
    with pytest.raises(UserError, match="the model is dense: it has none"):
        build_engine(CONFIG, tiny_qwen3(), byte_tokenizer())


def test_experts_that_are_called_in_another_way_are_refused():
    model = gpt_oss()
    for layer in model.model.layers:
        del layer.mlp.experts.is_transposed
    with pytest.raises(UserError, match="GptOssForCausalLM has 0 modules in a layer"):
        RouteRecorder(model)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, gpt_oss, deepseek_v3])
def test_every_layers_experts_are_found(make: Callable[[], PreTrainedModel]):
    model = make()
    for layer, experts in zip(model.model.layers, experts_of_layers(model), strict=True):
        assert experts is getattr(layer.mlp, "experts", None)
    recorder = RouteRecorder(twin_of(model, "eager"))
    assert recorder.shape_per_token == (len(model.model.layers), model.config.num_experts_per_tok)


def test_graphs_hold_only_experts_that_leave_the_host_alone(monkeypatch: pytest.MonkeyPatch):
    """Decided from the model: a float32 mixture cannot be recorded on a GPU, a dense model and a bfloat16 one can."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert why_not_recorded(tiny_qwen3()) is None
    model = gpt_oss().bfloat16()
    assert model.config._experts_implementation == "grouped_mm" and why_not_recorded(model) is None
    assert "are float32" in str(why_not_recorded(gpt_oss()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert "this one is 8.6" in str(why_not_recorded(model))
    model.set_experts_implementation("eager")
    assert "asks the host" in str(why_not_recorded(model))
    model.set_experts_implementation("batched_mm")
    assert why_not_recorded(model) is None
