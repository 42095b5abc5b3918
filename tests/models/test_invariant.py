"""Batch-invariant models: the ordinary ones' numbers and gradients, in bits that no company changes."""

# Shape letters: M scored tokens.

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn as nn
from tests.sampling import sampled
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ratoon.attention.impls import forget_choices
from ratoon.layout import PackedLayout, pack_groups
from ratoon.models import (
    FreshModelConfig,
    LoraConfig,
    ModelConfig,
    attach,
    build_policy,
    forward_logprobs,
    set_compile,
    set_recompute,
    set_sequence_parallel,
)
from ratoon.models.invariant import InvariantLinear, InvariantNorm, make_invariant
from ratoon.models.preview import preview_model
from ratoon.ops.invariant import entry
from ratoon.types import Prompt, Response, RolloutGroup, UserError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def group(name: str, P: int, *lengths: int) -> RolloutGroup:
    tokens = torch.randint(0, 96, (1 + len(lengths), 40), generator=torch.Generator().manual_seed(len(name) + P))
    responses = (Response(tokens[1 + index, :R].numpy()) for index, R in enumerate(lengths))
    return RolloutGroup(Prompt(name, tokens[0, :P].numpy()), tuple(responses))


FIRST, SECOND = group("a", 5, 3), group("second", 9, 4, 1, 6)


def llama(device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    return LlamaForCausalLM(config).to(device)  # pyright: ignore[reportArgumentType]


def loss_of(model: PreTrainedModel, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_M, entropy_M = forward_logprobs(model, layout, 0.8)
    weight_M = torch.linspace(-1.0, 1.0, layout.num_scored, device=logprobs_M.device)
    return logprobs_M.detach(), entropy_M.detach(), (logprobs_M * weight_M).sum() + 0.1 * entropy_M.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", sampled("full", "none", "selective"))
def test_numbers_and_gradients_are_the_ordinary_ones(device: str, recompute: Any):
    layout = pack_groups([FIRST, SECOND])
    ours, plain = attach(llama(device), batch_invariant=True), attach(llama(device))
    set_recompute(ours, recompute)
    found, wanted = loss_of(ours, layout), loss_of(plain, layout)
    assert torch.allclose(found[0], wanted[0], atol=1e-4) and torch.allclose(found[1], wanted[1], atol=1e-4)
    found[2].backward()
    wanted[2].backward()
    for (name, x), y in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert x.grad is not None and y.grad is not None
        assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-4), name
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), *DEVICES[1:]])
def test_adapters_are_invariant_too(device: str):
    fresh = FreshModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    config = ModelConfig(fresh=fresh, lora=LoraConfig(rank=4), batch_invariant=True)
    model = build_policy(config, seed=0, device=device)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 * 3 + 1 and all(isinstance(module, InvariantLinear) for module in linears)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator(device).manual_seed(0))
        alone_M = forward_logprobs(model, pack_groups([SECOND]))[0]
        together_M = forward_logprobs(model, pack_groups([FIRST, SECOND]))[0]
    assert torch.equal(together_M[-alone_M.numel() :], alone_M)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(48), nn.LayerNorm(48, bias=False), nn.RMSNorm(48, eps=1e-6), Qwen3RMSNorm(48), Gemma3RMSNorm(48)],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_of_every_make(norm: nn.Module, device: str):
    model, norm = llama(), copy.deepcopy(norm).to(device)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=torch.Generator(device).manual_seed(1))
    x = torch.randn(1, 33, 48, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    wanted = norm(x)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), x)
    model.model.norm = norm  # pyright: ignore[reportAttributeAccessIssue]
    make_invariant(model.to(device))  # pyright: ignore[reportArgumentType]
    assert isinstance(norm, InvariantNorm)
    found = norm(x)
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.allclose(found, wanted, atol=1e-5) and torch.allclose(grad, wanted_grad, atol=1e-3)
    assert torch.equal(norm(x[:, 3:4]), found[:, 3:4])


def test_a_model_that_is_not_invariant_after_all_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The first module whose rows change with their number is named; the model is as it was."""
    linear = entry.linear

    def spoilt(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        out = linear(x, weight_NK, bias_N)
        return out * (1 + 1e-6 * x.shape[-2]) if weight_NK.shape == (64, 32) else out

    monkeypatch.setattr(entry, "linear", spoilt)
    model = llama()
    with pytest.raises(UserError, match=r"alone and beside another differs by up to .* first in .*mlp\.gate_proj"):
        attach(model, batch_invariant=True)
    assert not any(isinstance(module, InvariantLinear | InvariantNorm) for module in model.modules())


def test_what_cannot_be_invariant_is_refused(monkeypatch: pytest.MonkeyPatch):
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    mixture = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=3)
    )
    with pytest.raises(UserError, match="for dense models, and this one has 3 experts a layer"):
        attach(mixture, batch_invariant=True)
    convolving = llama()
    convolving.model.layers[0].mixer = nn.Conv1d(4, 4, 3)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"does not know how Conv1d \(model.layers.0.mixer\) computes"):
        attach(convolving, batch_invariant=True)
    with pytest.raises(UserError, match=r"an attention of its own, and model.attention asks for 'flash'"):
        attach(llama(), "flash", batch_invariant=True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"cannot run here: no GPU; train on a GPU, or set model.batch_invariant"):
            attach(llama(), batch_invariant=True)
    forget_choices()


def test_what_would_undo_it_is_refused():
    model = attach(llama(), batch_invariant=True)
    with pytest.raises(UserError, match="a batch-invariant model is not compiled"):
        set_compile(model, "layers")

    @dataclasses.dataclass(frozen=True)
    class TwoRanks:
        size: int = 2

    with pytest.raises(UserError, match=r"set trainer.sequence_parallel to 1, or model.batch_invariant to false"):
        set_sequence_parallel(model, TwoRanks())  # pyright: ignore[reportArgumentType]
    assert vars(attach(model))["_ratoon_attachment"].batch_invariant, "attached again it stays so"


@pytest.mark.parametrize(
    ("name", "value", "also"),
    [("compile", "layers", {}), ("attention", "flex", {}), ("quantization", "nf4", {"lora": LoraConfig()})],
)
def test_settings_that_do_not_go_together(name: str, value: str, also: dict[str, Any]):
    fresh = FreshModelConfig()
    with pytest.raises(ValueError, match=f"batch_invariant does not go with {name} = '{value}'"):
        ModelConfig.model_validate({"fresh": fresh, "batch_invariant": True, name: value} | also)
    config = ModelConfig(fresh=fresh, batch_invariant=True)
    assert config.compile_on("cuda", num_experts=0) == "none"
    assert ModelConfig(fresh=fresh).compile_on("cuda", num_experts=0) == "layers"
    assert preview_model(config).num_parameters
