import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.rollout.http.fake import FakeServer
from tests.rollout.tiny import byte_tokenizer, tiny_qwen3
from transformers import Qwen3ForCausalLM

from ratoon.rollout import RolloutConfig
from ratoon.rollout.engines.http.engine import ServerEngine

VERSIONS = {"vllm-server": "0.32.0", "sglang-server": "0.5.23"}


@dataclass
class Bench:
    """A fake server of one kind, a model, and engines between them."""

    kind: str
    server: FakeServer
    model: Qwen3ForCausalLM
    engines: list[ServerEngine] = field(default_factory=list)

    @property
    def generate_path(self) -> str:
        return "/v1/completions" if self.kind == "vllm-server" else "/generate"

    def build(self, server: dict[str, Any] | None = None, **settings: Any) -> ServerEngine:
        table = {"url": self.server.url} | (server or {})
        config = RolloutConfig(engine=self.kind, server=table, **settings)  # pyright: ignore[reportArgumentType]
        engine = ServerEngine(config, self.model, byte_tokenizer())
        self.engines.append(engine)
        return engine

    def set_weights(self, value: float) -> None:
        """The number that the fake server's policy depends on."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)


@pytest.fixture(params=["vllm-server", "sglang-server"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    server = FakeServer(version=VERSIONS[request.param])
    found = Bench(request.param, server, tiny_qwen3())
    found.set_weights(0.5)
    yield found
    server.faults.clear()
    server.is_paused = False
    for engine in found.engines:
        asyncio.run(engine.close())
    server.close()
