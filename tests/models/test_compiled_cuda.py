"""Compiled layers on a GPU: ragged steps compile nothing anew, and the gradients are those of the plain layers."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, set_compile
from ratoon.types import Prompt, Response, RolloutGroup

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 1000


def small_model() -> PreTrainedModel:
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return attach(Qwen3ForCausalLM(config).bfloat16())


def ragged_layout(seed: int) -> PackedLayout:
    """Long-tailed lengths, as responses have them; one row to some ten thousand."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(5.0, 1.2, (rng.integers(1, 5), rng.integers(1, 9))), 3000).astype(int) + 1
    return pack_groups(
        [
            RolloutGroup(
                Prompt(index, rng.integers(0, VOCAB_SIZE, group[0])),
                tuple(Response(rng.integers(0, VOCAB_SIZE, R)) for R in group),
            )
            for index, group in enumerate(lengths.tolist())
        ]
    )


def gradients(model: PreTrainedModel, layout: PackedLayout) -> list[torch.Tensor]:
    model.zero_grad()
    forward_logprobs(model, layout)[0].mean().backward()
    return [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]


def test_fifty_ragged_steps_compile_nothing_anew():
    torch._dynamo.reset()
    counters.clear()
    model = set_compile(small_model(), "layers")
    gradients(model, ragged_layout(0))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 1, "one graph serves every layer"
    for seed in range(1, 51):
        gradients(model, ragged_layout(seed))
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


def test_gradients_are_those_of_the_plain_layers():
    torch._dynamo.reset()
    model = small_model()
    layouts = [ragged_layout(seed) for seed in (1, 2, 3, 34)]
    plain = [gradients(model, layout) for layout in layouts]
    set_compile(model, "layers")
    for layout, wanted in zip(layouts, plain, strict=True):
        for got, want in zip(gradients(model, layout), wanted, strict=True):
            assert (got - want).norm() < 0.05 * want.norm()
    torch._dynamo.reset()
