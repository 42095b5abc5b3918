"""vLLM gives its memory up and takes it back in an order that serves no stale weights. No vLLM is needed."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.rollout.tiny import byte_tokenizer, make_prompts, tiny_qwen3
from tests.rollout.vllm.fake_core import FakeCore
from torch import Tensor

from ratoon.rollout import RolloutConfig
from ratoon.rollout.engines.vllm import engine as module
from ratoon.rollout.engines.vllm.engine import VllmEngine
from ratoon.rollout.errors import RolloutError


class LoggingCore(FakeCore):
    """Writes down what happens to its memory."""

    def __init__(self) -> None:
        super().__init__(max_model_len=256)
        self.log: list[str] = []

    def load(self, weights: Mapping[str, Tensor], max_bytes: int, *, version: int) -> None:
        self.log.append(f"load {version}: {sum(1 for _ in weights.items())}")

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake(self, what: str) -> None:
        self.log.append(f"wake {what}")

    def score(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.zeros(token_ids.size - 1)

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> LoggingCore:
    core = LoggingCore()
    monkeypatch.setattr(module, "_start", lambda *_: core)
    monkeypatch.setattr(module, "check_settings", lambda *_: None)  # which refuses sleep on a CPU
    return core


def build(sleep: int) -> VllmEngine:
    config = RolloutConfig(engine="vllm", max_response_tokens=4, vllm={"sleep": sleep})  # type: ignore[arg-type]
    return VllmEngine(config, tiny_qwen3(), byte_tokenizer())


def test_an_update_comes_between_the_weights_waking_and_the_caches(core: LoggingCore):
    """TRL#5312, TRL#5313: sleep level 2 drops weights, and waking alone serves stale ones."""
    engine = build(2)
    num_weights = len(list(tiny_qwen3().named_parameters()))

    async def run() -> None:
        await engine.pause()
        await engine.update_weights({}, 1)
        await engine.resume()
        await engine.close()

    asyncio.run(run())
    assert core.log == [
        f"load 0: {num_weights}", "sleep 2", "wake weights", f"load 1: {num_weights}", "wake kv_cache",
        "close",
    ]  # fmt: skip
    assert engine.policy_version == 1


def test_level_2_without_an_update_does_not_serve(core: LoggingCore):
    engine = build(2)

    async def run() -> None:
        await engine.pause()
        with pytest.raises(RolloutError, match="slept at level 2, which drops its weights"):
            await engine.resume()
        await engine.update_weights({}, 1)
        await engine.resume()
        await engine.close()

    asyncio.run(run())


def test_level_1_wakes_with_its_weights_and_goes_on(core: LoggingCore):
    engine = build(1)
    (prompt,) = make_prompts([5])

    async def run() -> int:
        sampling = RolloutConfig(max_response_tokens=4).sampling_params(0)
        call = asyncio.create_task(engine.generate(prompt, group_size=2, sampling=sampling, step=0))
        await asyncio.sleep(0)
        await engine.pause()
        await engine.resume()
        group = await call
        await engine.close()
        return sum(response.num_tokens for response in group.responses)

    assert asyncio.run(run()) == 8
    assert core.log[1:] == ["sleep 1", "wake weights", "wake kv_cache", "close"]
