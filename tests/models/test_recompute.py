"""Recomputation saves memory, changes no result and no name, and computes with the right weights."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.families import VOCAB_SIZE, build_model, gradients
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import attach, forward_logprobs, set_recompute
from ratoon.models.config import Recompute
from ratoon.types import Prompt, Response, RolloutGroup

torch.set_num_threads(1)


def make_layout() -> PackedLayout:
    rng = np.random.default_rng(0)
    prompt = Prompt("p", rng.integers(3, VOCAB_SIZE, 20))
    return pack_groups([RolloutGroup(prompt, tuple(Response(rng.integers(3, VOCAB_SIZE, 30)) for _ in range(3)))])


def saved_bytes(model: PreTrainedModel, layout: PackedLayout) -> int:
    """Bytes that the graph keeps, parameters left out."""
    storages: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = forward_logprobs(model, layout)
    del keep
    return sum(storages.values())


def test_each_mode_keeps_less_than_the_one_before():
    model, layout = attach(build_model("llama", dtype=torch.float32)), make_layout()
    kept = [saved_bytes(set_recompute(model, mode), layout) for mode in ("none", "selective", "full")]
    assert kept[1] < 0.75 * kept[0]
    assert kept[2] < 0.5 * kept[1]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "gpt_oss", "cohere"])
def test_results_and_names_stay(name: str, mode: Any):
    """In float32 bit for bit: what is computed again is computed alike. In evaluation mode too."""
    model, layout = attach(build_model(name, dtype=torch.float32)).eval(), make_layout()
    names = list(model.state_dict())
    classes = [type(module).__name__ for module in model.modules()]
    plain, _ = forward_logprobs(model, layout)
    plain.sum().backward()
    expected = gradients(model)
    set_recompute(model, mode)
    assert list(model.state_dict()) == names
    assert [type(module).__name__ for module in model.modules()] == classes
    again, _ = forward_logprobs(model, layout)
    again.sum().backward()
    assert torch.equal(again, plain)
    for parameter, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-6)


def test_attention_runs_once_under_selective_and_twice_under_full(monkeypatch: pytest.MonkeyPatch):
    from ratoon.models import interface

    model, layout = attach(build_model("llama", dtype=torch.float32)), make_layout()
    calls = 0
    honest = interface.forest_attention

    def counted(*args: Any, **keywords: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return honest(*args, **keywords)

    monkeypatch.setattr(interface, "forest_attention", counted)
    expected_calls: dict[Recompute, int] = {"none": 2, "selective": 2, "full": 4}
    for mode, expected in expected_calls.items():
        set_recompute(model, mode)
        calls = 0
        forward_logprobs(model, layout)[0].sum().backward()
        assert calls == expected, mode
    calls = 0
    with torch.no_grad():
        forward_logprobs(model, layout)
    assert calls == 2


def test_none_restores_every_class():
    model = attach(build_model("llama"))
    classes = [type(module) for module in model.modules()]
    for mode in ("selective", "full", "selective", "none"):
        set_recompute(model, mode)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_copy_recomputes_with_its_own_weights(mode: Any):
    model, layout = set_recompute(attach(build_model("llama", dtype=torch.float32)), mode), make_layout()
    forward_logprobs(model, layout)[0].sum().backward()
    expected = gradients(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    forward_logprobs(twin, layout)[0].sum().backward()
    for name, gradient in gradients(twin).items():
        assert torch.equal(gradient, expected[name])


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="not attached"):
        set_recompute(build_model("llama"), "full")
    model = attach(build_model("llama"))
    with pytest.raises(ValueError, match="none, selective, full, got 'some'"):
        set_recompute(model, "some")  # pyright: ignore[reportArgumentType]
