"""The output head that vLLM before 0.26 gets, over a stand-in of 0.24.0's layer. No vLLM is needed."""

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.rollout.vllm.stand_ins import fresh
from torch import Tensor, nn

NUM_TOKENS, HIDDEN, VOCAB, PADDED = 7, 5, 11, 16


class Embedding:
    """`UnquantizedEmbeddingMethod`."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


@dataclass
class Head:
    weight: Tensor
    quant_method: object


@dataclass
class StandIn:
    head: ModuleType
    layer: type[Any]
    registry: dict[str, type[Any]]

    def logits(self, hidden_TD: Tensor, head: Head, bias_V: Tensor | None) -> Tensor:
        return self.layer(VOCAB)(head, hidden_TD, bias_V)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StandIn:
    """`model_executor/custom_op.py` and `layers/logits_processor.py` of 0.24.0. Parameter: the recipe's head_dtype."""
    registry: dict[str, type[Any]] = {}

    class PluggableLayer(nn.Module):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, *, name: str) -> Any:
            assert name not in registry
            return lambda layer: registry.setdefault(name, layer)

    class LogitsProcessor(PluggableLayer):
        def __init__(self, vocab_size: int, org_vocab_size: int | None = None) -> None:
            super().__init__()
            self.org_vocab_size = org_vocab_size or vocab_size

        def forward(self, lm_head: Head, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
            return self._get_logits(hidden_states, lm_head, embedding_bias)

        def _gather_logits(self, logits: Tensor) -> Tensor:
            return logits

        def _get_logits(self, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None) -> Tensor:
            logits = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
            return self._gather_logits(logits)[..., : self.org_vocab_size]

    hf_config = SimpleNamespace(head_dtype=getattr(request, "param", "float32"))
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
    layers = "vllm.model_executor.layers"
    head = fresh(
        monkeypatch,
        "head",
        {
            "vllm.config": {"get_current_vllm_config": lambda: config},
            "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": registry},
            f"{layers}.logits_processor": {"LogitsProcessor": LogitsProcessor},
            f"{layers}.vocab_parallel_embedding": {
                "UnquantizedEmbeddingMethod": Embedding,
                "VocabParallelEmbedding": nn.Module,
            },
        },
    )
    return StandIn(head, LogitsProcessor, registry)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((NUM_TOKENS, HIDDEN), (PADDED, HIDDEN), (PADDED,))
    hidden_TD, head_VD, bias_V = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return hidden_TD, head_VD, bias_V


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_of_16_bit_factors_are_not_rounded_to_16_bits(vllm: StandIn, has_bias: bool):
    hidden_TD, head_VD, bias_V = tensors()
    vllm.head.register_head()
    logits_TV = vllm.logits(hidden_TD, Head(head_VD, Embedding()), bias_V if has_bias else None)
    want_TV = hidden_TD.double() @ head_VD.double().t() + has_bias * bias_V.double()
    assert logits_TV.dtype == torch.float32 and logits_TV.shape == (NUM_TOKENS, VOCAB)
    torch.testing.assert_close(logits_TV.double(), want_TV[:, :VOCAB], atol=1e-5, rtol=0)


@pytest.mark.parametrize("vllm", ["model"], indirect=True)
def test_of_the_models_dtype_they_are_vllms_own(vllm: StandIn):
    hidden_TD, head_VD, _ = tensors()
    vllm.head.register_head()
    logits_TV = vllm.logits(hidden_TD, Head(head_VD, Embedding()), None)
    assert logits_TV.dtype == torch.bfloat16
    assert torch.equal(logits_TV, (hidden_TD @ head_VD.t())[:, :VOCAB])


def test_a_quantized_head_is_refused(vllm: StandIn):
    hidden_TD, head_VD, _ = tensors()
    vllm.head.register_head()
    with pytest.raises(ValueError, match=r"not quantized, got one with SimpleNamespace; set rollout\.vllm\.head_dtype"):
        vllm.logits(hidden_TD, Head(head_VD, SimpleNamespace()), None)


def test_the_head_is_registered_once_and_never_over_a_plugins(vllm: StandIn):
    vllm.head.register_head()
    vllm.head.register_head()
    assert list(vllm.registry.values()) == [vllm.head.HeadOfDtype]
    vllm.registry["LogitsProcessor"] = SimpleNamespace  # type: ignore[assignment]
    with pytest.warns(RuntimeWarning, match=r"types\.SimpleNamespace here, of a plugin"):
        vllm.head.register_head()
    assert vllm.registry["LogitsProcessor"] is SimpleNamespace
