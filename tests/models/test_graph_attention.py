"""Attention as one node of a compiled layer: what the compiler is told of it, and how long its forest is kept."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model, gradients
from tests.sampling import sampled
from torch._dynamo.utils import counters

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, set_compile
from ratoon.models.forest import Forest
from ratoon.models.forward import score_forest
from ratoon.models.graph_attention import attend_in_graph
from ratoon.types import Prompt, Response, RolloutGroup

torch.set_num_threads(1)


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


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("layout", [make_layout(7, 3, 5), make_layout(1)])
def test_the_compiler_is_told_the_truth(layout: PackedLayout, has_sinks: bool, window: int | None):
    forest = Forest.build(layout, device="cpu", impl="reference")
    T = layout.num_rows
    q, k, v = (torch.randn(H, T, D, dtype=torch.float64).transpose(0, 1) for H, D in ((4, 8), (2, 8), (2, 6)))
    sinks = torch.randn(4, dtype=torch.float64) if has_sinks else None
    inputs = [x if x is None else x.requires_grad_() for x in (q, k, v, sinks)]
    torch.library.opcheck(
        torch.ops.ratoon.attend_forest.default,  # pyright: ignore[reportArgumentType]
        (*inputs, forest.number, window, 0.3, 2.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(("name", "num_kinds"), [("gemma2", 2), pytest.param("qwen3", 1, marks=pytest.mark.full)])
def test_a_layer_is_one_graph(name: str, num_kinds: int):
    """Gemma 2 has two kinds of layers: with a window and without. A break would cost copies, and time of the host."""
    model = set_compile(attach(build_model(name, dtype=torch.float32)), "layers", backend="aot_eager")
    forward_logprobs(model, make_layout(20, 30, 5))[0].sum().backward()
    assert counters["stats"]["unique_graphs"] == num_kinds
    assert not counters["graph_break"]


@pytest.mark.full
def test_sinks_learn_in_a_graph():
    model = attach(build_model("gpt_oss", dtype=torch.float32))
    layout = make_layout(9, 6, 4)

    def update() -> dict[str, torch.Tensor]:
        model.zero_grad()
        forward_logprobs(model, layout)[0].sum().backward()
        return gradients(model)

    wanted = update()
    assert any("sinks" in name and gradient.abs().max() > 0 for name, gradient in wanted.items())
    set_compile(model, "layers", backend="aot_eager")
    got = update()
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5) for name in wanted)


@pytest.mark.parametrize("is_compiled", sampled(False, True))
def test_a_forest_lives_as_long_as_the_graph_of_its_pass(is_compiled: bool):
    model = attach(build_model("qwen3", dtype=torch.float32))
    if is_compiled:
        set_compile(model, "layers", backend="aot_eager")
    forest = Forest.build(make_layout(9, 6, 4), device="cpu")
    alive = weakref.ref(forest)
    logprobs_M = score_forest(model, forest)[0]
    del forest
    gc.collect()
    assert alive() is not None, "backward needs it"
    logprobs_M.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    del logprobs_M
    gc.collect()
    assert alive() is None


def test_a_forest_that_is_gone_is_named():
    layout = make_layout(4, 2)
    x = torch.zeros(layout.num_rows, 2, 8)
    number = Forest.build(layout, device="cpu").number
    settings: dict[str, Any] = {"window": None, "softmax_scale": 1.0, "softcap": None}
    with pytest.raises(AssertionError, match="is gone"):
        attend_in_graph(x, x, x, None, number, **settings)


def test_flex_keeps_its_own_graphs():
    assert Forest.build(make_layout(4, 2), device="cpu", impl="auto").fits_a_graph
    assert not Forest.build(make_layout(4, 2), device="cpu", impl="flex").fits_a_graph
