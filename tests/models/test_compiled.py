"""Compiled layers compute the same, and compile nothing again when only lengths change."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model, gradients
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import (
    FreshModelConfig,
    ModelConfig,
    attach,
    build_policy,
    forward_logprobs,
    is_compiled,
    set_compile,
    set_recompute,
    stock_attention,
)
from ratoon.models.compiled import layers_as_written
from ratoon.types import Prompt, Response, RolloutGroup, UserError

torch.set_num_threads(1)

BACKEND = "aot_eager"
"""Graphs as the compiler splits them, forward and backward, without the code that it would write for them."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_layout(P: int, *Rs: int) -> PackedLayout:
    rng = np.random.default_rng(P)
    prompt = Prompt("p", rng.integers(3, VOCAB_SIZE, P))
    return pack_groups([RolloutGroup(prompt, tuple(Response(rng.integers(3, VOCAB_SIZE, R)) for R in Rs))])


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def update(model: PreTrainedModel, layout: PackedLayout) -> dict[str, torch.Tensor]:
    model.zero_grad()
    forward_logprobs(model, layout)[0].sum().backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen3", "none"),
        pytest.param("gemma2", "selective", marks=pytest.mark.full),
        pytest.param("qwen3", "selective", marks=pytest.mark.full),
        pytest.param("qwen3", "full", marks=pytest.mark.full),
        pytest.param("gemma2", "none", marks=pytest.mark.full),
        pytest.param("gemma2", "full", marks=pytest.mark.full),
    ],
)
def test_results_stay_and_lengths_compile_nothing_anew(name: str, mode: Any):
    """Recompiled at every new length, a step took minutes: unsloth#6871. gemma2 has two kinds of layers."""
    model = set_recompute(attach(build_model(name, dtype=torch.float32)), mode)
    layouts = [make_layout(20 + 7 * n, 30 - n, 5 + n, 1) for n in range(6)]
    expected = [update(model, layout) for layout in layouts]
    set_compile(model, "layers", backend=BACKEND)
    graphs: list[int] = []
    for layout, wanted in zip(layouts, expected, strict=True):
        got = update(model, layout)
        assert got.keys() == wanted.keys()
        for parameter, gradient in got.items():
            assert torch.allclose(gradient, wanted[parameter], rtol=1e-4, atol=1e-5), parameter
        graphs.append(num_graphs())
    assert graphs[0] > 0, "nothing was compiled"
    assert len(set(graphs)) == 1, f"graphs after each layout: {graphs}"


@pytest.mark.full
def test_names_and_copies():
    model = attach(build_model("qwen3", dtype=torch.float32))
    names = list(model.state_dict())
    layout = make_layout(20, 30, 5)
    wanted = update(model, layout)
    set_compile(model, "layers", backend=BACKEND)
    assert list(model.state_dict()) == names
    update(model, layout)
    compiled_graphs = num_graphs()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert any((update(twin, layout)[name] != wanted[name]).any() for name in wanted), "a copy computes with its own"
    assert num_graphs() == compiled_graphs, "a copy is not compiled"
    set_compile(model, "none")
    torch._dynamo.reset()
    counters.clear()
    assert all(torch.equal(update(model, layout)[name], wanted[name]) for name in wanted)
    assert num_graphs() == 0


@pytest.mark.full
def test_generation_compiles_nothing():
    """Its shapes change with every token, and its attention is another."""
    model = set_compile(attach(build_model("qwen3", dtype=torch.float32)), "layers", backend=BACKEND).eval()
    prompt = torch.randint(3, VOCAB_SIZE, (2, 9))
    with stock_attention(model, "sdpa"), torch.no_grad():
        model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)  # pyright: ignore[reportCallIssue]
    assert num_graphs() == 0
    forward_logprobs(model, make_layout(9, 4))
    assert num_graphs() > 0


def test_layers_as_written_compile_nothing():
    model = set_compile(attach(build_model("qwen3", dtype=torch.float32)), "layers", backend=BACKEND)
    with layers_as_written(model), torch.no_grad():
        assert not is_compiled(model)
        forward_logprobs(model, make_layout(9, 4))
    assert num_graphs() == 0
    assert is_compiled(model)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="not attached"):
        set_compile(build_model("qwen3", dtype=torch.float32), "layers")
    model = attach(build_model("qwen3", dtype=torch.float32))
    wrong: Any = "all"
    with pytest.raises(ValueError, match="compile must be one of none, layers, got 'all'"):
        set_compile(model, wrong)
    monkeypatch.setattr("ratoon.models.layers.GradientCheckpointingLayer", int)
    with pytest.raises(UserError, match="does not mark its layers"):
        set_compile(model, "layers")


def test_auto_compiles_dense_models_on_gpus():
    config = ModelConfig(path="x")
    assert config.compile == "auto"
    assert config.compile_on("cuda", num_experts=0) == "layers"
    assert config.compile_on("cuda", num_experts=8) == "none"
    assert config.compile_on("cpu", num_experts=0) == "none"
    assert ModelConfig(path="x", compile="layers").compile_on("cpu", num_experts=8) == "layers"


@pytest.mark.parametrize("choice", ["auto", "layers"])
def test_a_built_policy_is_compiled_as_its_config_says(choice: Any):
    config = ModelConfig(fresh=FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=1), compile=choice)
    assert is_compiled(build_policy(config, seed=0)) == (choice == "layers")
