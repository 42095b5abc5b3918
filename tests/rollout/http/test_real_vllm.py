"""vLLM's real server on the CPU: run by `make test-vllm`, or where RATOON_VLLM_PYTHON names a Python with vLLM."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.rollout.parts import in_parts
from tests.rollout.tiny import EOS, VOCAB, byte_tokenizer, draw, make_prompts
from transformers import Qwen3Config, Qwen3ForCausalLM

from ratoon.rollout import RolloutConfig, RolloutError
from ratoon.rollout.engines.http.engine import ServerEngine
from ratoon.types import FinishReason, RolloutGroup, SamplingParams, UserError

PYTHON = os.environ.get("RATOON_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else None)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.timeout(900),
]
SAMPLING = SamplingParams(temperature=0.7, max_response_tokens=40, seed=3)
LONG = SamplingParams(temperature=0.7, max_response_tokens=200, seed=3)
SECONDS_LONG = SamplingParams(temperature=0.7, max_response_tokens=1500, seed=3)
"""So that a server is not done, all of it on its way, before this process comes to kill it on a busy machine."""
OPTIONS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager")


def small_qwen3() -> Qwen3ForCausalLM:
    """Of head dim 32, the least that vLLM's CPU attention has; embeddings tied, as small models have them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=EOS + 1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def build(run_dir: Path, *options: str, restarts: int = 0) -> ServerEngine:
    assert PYTHON is not None
    table: dict[str, Any] = {
        "command": (PYTHON, "-m", "vllm.entrypoints.openai.api_server", *OPTIONS, *options),
        "environment": ("VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1"),
        "restarts": restarts,
    }
    config = RolloutConfig(engine="vllm-server", server=table)  # pyright: ignore[reportArgumentType]
    return ServerEngine(config, small_qwen3(), byte_tokenizer(), run_dir)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerEngine]:
    found = build(tmp_path_factory.mktemp("run"), restarts=1)
    yield found
    asyncio.run(found.close())


def largest_gap(model: Qwen3ForCausalLM, group: RolloutGroup, temperature: float) -> float:
    """Between the server's log-probs and one whole forward pass of transformers a response, in float64 from logits."""
    gaps = [0.0]
    for response in group.responses:
        ids = torch.tensor([[*group.prompt.token_ids.tolist(), *response.token_ids.tolist()]])
        with torch.no_grad():
            logits_TV = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        rows = torch.arange(group.prompt.num_tokens - 1, ids.shape[1] - 1)
        wanted = logprobs_TV[rows, ids[0, rows + 1]].numpy()
        assert response.rollout_logprobs is not None
        gaps.append(float(np.abs(wanted - response.rollout_logprobs).max()))
    return max(gaps)


def change(model: Qwen3ForCausalLM, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def test_logprobs_equal_transformers(engine: ServerEngine):
    """TRL#4159, TRL#6789. The first call starts the server."""
    prompts = make_prompts([5, 17, 33])
    groups = draw(engine, prompts, 4, SAMPLING)
    for group in groups:
        assert largest_gap(engine._model, group, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]
    for first, second in zip(groups, draw(engine, prompts, 4, SAMPLING), strict=True):
        for a, b in zip(first.responses, second.responses, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()


def test_new_weights_change_logprobs_as_the_trainers_do(engine: ServerEngine):
    """verl#6813: weights arrived corrupt. Fixed tokens and fresh draws agree with the trainer after each update."""
    model = engine._model
    tokens = np.random.default_rng(3).integers(0, EOS, 33)
    draw(engine, make_prompts([3]), 1, SAMPLING)
    before_M = asyncio.run(engine.score(tokens))
    for version, factor in enumerate((1.05, 0.93), start=1):
        change(model, factor)  # pyright: ignore[reportArgumentType]
        asyncio.run(engine.update_weights({}, version))
        (group,) = draw(engine, make_prompts([9]), 4, SAMPLING, step=version)
        assert largest_gap(model, group, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]
        assert set(np.concatenate([r.policy_versions for r in group.responses if r.policy_versions is not None])) == {
            version
        }
        ids = torch.tensor(tokens)[None]
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
        wanted_M = logprobs_TV[torch.arange(32), ids[0, 1:]].numpy()
        scores_M = asyncio.run(engine.score(tokens))
        np.testing.assert_allclose(scores_M, wanted_M, rtol=0, atol=1e-4)
        assert np.abs(scores_M - before_M).max() > 1e-2
        before_M = scores_M


def test_updates_and_a_pause_in_flight_lose_nothing(engine: ServerEngine):
    """Under one policy, so that every token's log-prob can be checked, whatever stopped its response."""
    draw(engine, make_prompts([3]), 1, SAMPLING)
    version = engine.policy_version

    async def run() -> list[RolloutGroup]:
        calls = [engine.generate(p, group_size=4, sampling=LONG, step=0) for p in make_prompts([5, 17, 33])]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.3)
        await engine.update_weights({}, version + 1)
        await asyncio.sleep(0.1)
        await engine.pause()
        await engine.resume()
        return list(await asyncio.gather(*tasks))

    for group in asyncio.run(run()):
        assert group.group_size == 4
        assert largest_gap(engine._model, group, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]
        for response in group.responses:
            assert response.finish_reason in (FinishReason.EOS, FinishReason.LENGTH)
            assert response.policy_versions is not None and (np.diff(response.policy_versions) >= 0).all()


def test_budgets_stop_strings_and_abort(engine: ServerEngine):
    prompt = make_prompts([6])[0]
    parts = asyncio.run(in_parts(engine, prompt, 2, LONG, [7, 50], step=2))
    assert largest_gap(engine._model, parts, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]

    async def aborted() -> RolloutGroup:
        task = asyncio.create_task(engine.generate(prompt, group_size=4, sampling=LONG, step=3))
        while not any(call.draft.num_tokens for call in engine._calls.values()):
            await asyncio.sleep(0.005)
        await engine.abort()
        return await task

    group = asyncio.run(aborted())
    assert largest_gap(engine._model, group, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]


def kill_api_server(engine: ServerEngine) -> None:
    process = engine._link._process
    assert process is not None
    (api_server,) = psutil.Process(process.pid).children()
    os.kill(api_server.pid, signal.SIGKILL)


async def killed_while_generating(engine: ServerEngine) -> list[RolloutGroup]:
    calls = [engine.generate(p, group_size=4, sampling=SECONDS_LONG, step=7) for p in make_prompts([5, 17, 9, 30])]
    tasks = [asyncio.create_task(call) for call in calls]
    while sum(call.draft.num_tokens for call in engine._calls.values()) < 20:
        await asyncio.sleep(0.002)
    kill_api_server(engine)
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 600))


def test_a_killed_server_is_started_again_then_named(engine: ServerEngine):
    """TRL#7176. Once by policy, with the responses' tokens kept; the next death is an error, and soon."""
    draw(engine, make_prompts([3]), 1, SAMPLING)
    for group in asyncio.run(killed_while_generating(engine)):
        assert group.group_size == 4
        assert largest_gap(engine._model, group, 0.7) < 1e-4  # pyright: ignore[reportArgumentType]
    assert engine._link.num_starts == 2

    with pytest.raises(RolloutError, match=r"(?s)is gone: it was killed by signal 9.*restarts = 1 allows no more"):
        asyncio.run(asyncio.wait_for(killed_while_generating(engine), 60))


@pytest.mark.full
def test_a_server_with_raw_logprobs_is_refused(tmp_path: Path):
    engine = build(tmp_path, "--logprobs-mode", "raw_logprobs")
    try:
        with pytest.raises(UserError, match="not those of the sampling temperature"):
            draw(engine, make_prompts([3]), 1, SAMPLING)
    finally:
        asyncio.run(engine.close())
