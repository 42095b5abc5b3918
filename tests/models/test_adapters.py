"""Low-rank adapters on packed layouts, against stock peft models one sequence at a time."""

# Shape letters: M scored tokens.

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from tests.parity.families import backward, build_model, kept_in_float64, reference_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import (
    LoraConfig,
    adapters_off,
    add_adapters,
    are_adapters_off,
    attach,
    describe_adapters,
    forward_logprobs,
    has_adapters,
    set_recompute,
)
from ratoon.models.adapters import lora_targets, merge_adapters, num_adapter_parameters, save_adapters
from ratoon.models.config import Recompute
from ratoon.types import Prompt, Response, RolloutGroup, UserError

LORA = LoraConfig(rank=3, alpha=5)


def group(name: str, prompt: list[int], *responses: list[int]) -> RolloutGroup:
    return RolloutGroup(Prompt(name, np.array(prompt)), tuple(Response(np.array(tokens)) for tokens in responses))


GROUPS = [
    group("a", [7, 3, 11, 5, 2], [9, 4], [8], [12, 1, 30, 6]),
    group("b", [1], [5, 5, 6], [17, 2]),
]


@pytest.fixture
def layout() -> PackedLayout:
    return pack_groups(GROUPS)


def adapted(name: str, config: LoraConfig = LORA, **kwargs: Any) -> PreTrainedModel:
    return add_adapters(attach(build_model(name, **kwargs)), config, seed=1)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Adapters as large as the weights beside them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def loss_of(logprobs_M: Tensor) -> Tensor:
    return (logprobs_M * torch.linspace(-1, 1, logprobs_M.numel(), dtype=logprobs_M.dtype)).sum()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "qwen3_moe"])
def test_packed_adapters_equal_a_stock_peft_model(name: str, layout: PackedLayout, tmp_path: Path):
    """Log-probs to 1e-10 and adapter gradients to 1e-9 in float64; merged weights too."""
    plain = build_model(name)
    plain.set_attn_implementation("eager")  # the others leave out Gemma 2's softcap
    # peft's own "all-linear" would adapt the experts of a mixture too.
    linear = ["q_proj", "k_proj", "v_proj", "o_proj"] if name == "qwen3_moe" else "all-linear"
    stock = get_peft_model(
        copy.deepcopy(plain), PeftLoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=linear)
    )
    model = add_adapters(attach(copy.deepcopy(plain)), LORA, seed=1)
    randomize(model)
    own = trained(model)
    theirs = {key.removeprefix("base_model.model."): parameter for key, parameter in trained(stock).items()}
    assert own.keys() == theirs.keys()
    with torch.no_grad():
        for key, parameter in theirs.items():
            parameter.data = own[key].detach().clone()

    with kept_in_float64():
        logprobs_M, _ = forward_logprobs(model, layout)
        expected_M = reference_logprobs(stock, layout)  # pyright: ignore[reportArgumentType]
        backward(loss_of(logprobs_M))
        backward(loss_of(expected_M))
        with torch.no_grad():
            plain_M = reference_logprobs(plain, layout)
    assert (expected_M - plain_M).abs().max() > 0.1, "the adapters must show"
    torch.testing.assert_close(logprobs_M, expected_M, rtol=0, atol=1e-10)
    for key, parameter in own.items():
        assert parameter.grad is not None and theirs[key].grad is not None
        torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=1e-9, atol=1e-9)
        assert parameter.grad.abs().max() > 0, key

    save_adapters(model, tmp_path, base_path=None)
    merged = attach(merge_adapters(plain, tmp_path))
    with kept_in_float64(), torch.no_grad():
        merged_M, _ = forward_logprobs(merged, layout)
    torch.testing.assert_close(merged_M, expected_M, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_begin_as_nothing(layout: PackedLayout, dtype: torch.dtype):
    model = attach(build_model("qwen3", dtype=dtype))
    before_M, _ = forward_logprobs(model, layout)
    add_adapters(model, LORA, seed=1)
    after_M, _ = forward_logprobs(model, layout)
    assert torch.equal(before_M, after_M)
    assert {parameter.dtype for parameter in trained(model).values()} == {dtype}


def test_adapters_follow_their_seed_and_leave_the_global_state_alone():
    before = torch.get_rng_state()
    first, same = adapted("llama"), adapted("llama")
    assert torch.equal(torch.get_rng_state(), before)
    other = add_adapters(attach(build_model("llama")), LORA, seed=2)
    for name, parameter in trained(first).items():
        assert torch.equal(parameter, trained(same)[name])
        if "lora_A" in name:
            assert not torch.equal(parameter, trained(other)[name])
        else:
            assert not parameter.any()


def test_scale_of_rslora(layout: PackedLayout):
    plain, rank_stable = (
        adapted("llama", LoraConfig(rank=4, alpha=alpha, rslora=on)) for alpha, on in ((8, False), (4, True))
    )
    for model in (plain, rank_stable):
        randomize(model)
    # 8 / 4 and 4 / sqrt(4)
    assert torch.equal(forward_logprobs(plain, layout)[0], forward_logprobs(rank_stable, layout)[0])


def test_adapters_off_is_the_base(layout: PackedLayout):
    base = attach(build_model("qwen3"))
    base_M, _ = forward_logprobs(base, layout)
    model = adapted("qwen3")
    randomize(model)
    policy_M, _ = forward_logprobs(model, layout)
    names = list(trained(model))
    with adapters_off(model):
        assert are_adapters_off(model)
        with adapters_off(model):
            assert torch.equal(forward_logprobs(model, layout)[0], base_M)
        assert are_adapters_off(model), "the inner context must not switch them on"
        assert torch.equal(forward_logprobs(model, layout)[0], base_M)
    assert not are_adapters_off(model) and list(trained(model)) == names
    assert torch.equal(forward_logprobs(model, layout)[0], policy_M)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert not are_adapters_off(model) and list(trained(model)) == names
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no adapters to switch off"), adapters_off(base):
        pass


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_reference_may_be_scored_between_forward_and_backward(layout: PackedLayout, recompute: Recompute):
    """With recomputation too, which runs the policy's layers again after the adapters were off."""
    expected, model = adapted("llama"), set_recompute(adapted("llama"), recompute)
    for each in (expected, model):
        randomize(each)
    loss_of(forward_logprobs(expected, layout)[0]).backward()
    loss = loss_of(forward_logprobs(model, layout)[0])
    with torch.no_grad(), adapters_off(model):
        forward_logprobs(model, layout)
    loss.backward()
    for name, parameter in trained(model).items():
        gradient = trained(expected)[name].grad
        assert parameter.grad is not None and gradient is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


class _Shapes(TorchDispatchMode):
    """The shape of everything that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view is no work: frozen weights are transposed to carry the gradient on.
        if func._schema.is_mutable or not any(output.alias_info for output in func._schema.returns):
            for output in result if isinstance(result, tuple | list) else (result,):
                if isinstance(output, Tensor):
                    self.seen.add(tuple(output.shape))
        return result


def test_no_gradient_of_a_frozen_weight_is_computed(layout: PackedLayout):
    """Nor of the head, whose [V, C] would be the largest."""

    def computed(model: PreTrainedModel) -> set[tuple[int, ...]]:
        loss = loss_of(forward_logprobs(model, layout)[0])
        with _Shapes() as shapes:
            loss.backward()
        return shapes.seen

    weights = {"model.layers.0.mlp.up_proj": (28, 24), "lm_head": (37, 24), "model.layers.1.self_attn.q_proj": (32, 24)}
    plain = attach(build_model("llama", dtype=torch.float32))
    for name, shape in weights.items():
        assert tuple(plain.get_parameter(f"{name}.weight").shape) == shape
    assert set(weights.values()) <= computed(plain), "the probe sees weight gradients where there are any"
    model = adapted("llama", dtype=torch.float32)
    randomize(model)
    assert computed(model).isdisjoint({*weights.values(), *((C, K) for K, C in weights.values())})
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


@pytest.mark.parametrize(
    ("family", "names", "words"),
    [
        ("llama", ["lm_head"], "'lm_head' is the output head, whose weight is read directly"),
        ("llama", ["q_proj", "embed_tokens"], "'embed_tokens' is the embedding"),
        ("llama", ["query"], "'query' names no layer of the model"),
        ("llama", ["input_layernorm"], "'input_layernorm' is a LlamaRMSNorm, not a linear layer"),
        ("qwen3_moe", ["gate_up_proj"], "'gate_up_proj' is a parameter of fused experts"),
        ("qwen3_moe", ["mlp.gate"], "'mlp.gate' is a Qwen3MoeTopKRouter, not a linear layer"),
    ],
)
def test_what_cannot_be_adapted(family: str, names: list[str], words: str):
    model = attach(build_model(family))
    with pytest.raises(UserError, match=r"model.lora.target_modules: ") as caught:
        add_adapters(model, LoraConfig(target_modules=tuple(names)), seed=0)
    assert words in str(caught.value)
    assert "layers of " in str(caught.value) and "q_proj, k_proj, v_proj, o_proj" in str(caught.value)
    assert "lm_head" not in str(caught.value).rpartition("that can:")[2]
    assert not has_adapters(model) and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("names", "adapted_layers"),
    [
        (["q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (["mlp.up_proj"], ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]),
        (["layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["v_proj", "layers.0.mlp.down_proj"],
         ["model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"]),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_name(names: list[str], adapted_layers: list[str], tmp_path: Path):
    config = LoraConfig(rank=3, target_modules=tuple(names))
    model = build_model("llama")
    assert list(lora_targets(model, config)) == adapted_layers
    expected = num_adapter_parameters(model, config)
    add_adapters(attach(model), config, seed=0)
    found = trained(model)
    assert {name.partition(".lora_")[0] for name in found} == set(adapted_layers)
    assert sum(parameter.numel() for parameter in found.values()) == expected
    save_adapters(model, tmp_path, base_path=None)
    stock = PeftModel.from_pretrained(build_model("llama"), tmp_path)
    assert {name.partition(".lora_")[0] for name, _ in stock.named_parameters() if "lora_" in name} == {
        f"base_model.model.{name}" for name in adapted_layers
    }


def test_the_line_for_the_log():
    dense = describe_adapters(adapted("llama"))
    assert dense.startswith("LoRA of rank 3 on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: ")
    model = adapted("llama")
    num_trained = sum(parameter.numel() for parameter in trained(model).values())
    num_all = sum(parameter.numel() for parameter in model.parameters())
    assert f": {num_trained:,} of {num_all:,} parameters train ({num_trained / num_all:.2%})" in dense
    assert "experts" not in dense
    assert describe_adapters(adapted("mixtral")).endswith("; fused experts stay frozen")


def test_peft_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.models.adapters.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'model.lora needs the peft package: pip install -e "\.\[lora\]"'):
        add_adapters(build_model("llama"), LORA, seed=0)


def test_peft_is_too_old_for_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.models.adapters.version", lambda name: "0.9.0")
    with pytest.raises(UserError, match=r"model.lora needs peft \d.* or newer, and 0.9.0 is installed: pip install"):
        add_adapters(build_model("llama"), LORA, seed=0)


def test_attach_after_adapters(layout: PackedLayout):
    """Another attention implementation in the midst of training: the check then includes the adapters."""
    model = adapted("qwen3")
    randomize(model)
    before_M, _ = forward_logprobs(model, layout)
    after_M, _ = forward_logprobs(attach(model, "reference"), layout)
    torch.testing.assert_close(after_M, before_M, rtol=0, atol=1e-6)
