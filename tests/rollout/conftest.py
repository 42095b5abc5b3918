import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
from tests.rollout.tiny import byte_tokenizer, tiny_qwen3
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from ratoon.rollout.config import RolloutConfig
from ratoon.rollout.engines.in_process import InProcessEngine
from ratoon.rollout.engines.transformers import TransformersEngine


class Build(Protocol):
    """Builds an engine over `of`, or over the fixture `model`, and closes it after the test."""

    def __call__(self, of: PreTrainedModel | None = None, **settings: Any) -> InProcessEngine[Any]: ...


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return tiny_qwen3()


@pytest.fixture
def engine_class() -> Callable[[RolloutConfig, PreTrainedModel, PreTrainedTokenizerFast], InProcessEngine[Any]]:
    return TransformersEngine


@pytest.fixture
def build(
    engine_class: Callable[[RolloutConfig, PreTrainedModel, PreTrainedTokenizerFast], InProcessEngine[Any]],
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Build]:
    engines: list[InProcessEngine[Any]] = []

    def make(of: PreTrainedModel | None = None, **settings: Any) -> InProcessEngine[Any]:
        engine = engine_class(RolloutConfig(**settings), of or model, tokenizer)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine._config = RolloutConfig()  # tests of short timeouts need not close as fast
        asyncio.run(engine.close())
