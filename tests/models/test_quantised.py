"""Adapters beside weights in 4 bits: the same as adapters beside ordinary weights of the rounded values."""

# Shape letters: C input channels, K output channels.

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.layout import pack_groups, pack_sequences
from ratoon.models import (
    FreshModelConfig,
    LoraConfig,
    ModelConfig,
    adapters_off,
    add_adapters,
    attach,
    build_fresh,
    build_policy,
    forward_logprobs,
    load_merged,
)
from ratoon.models.adapters import describe_adapters
from ratoon.models.config import Dtype
from ratoon.models.load import cast_weights
from ratoon.models.preview import preview_model
from ratoon.models.quantised import QuantisedLinear, count_weights, quantise, round_weights
from ratoon.planner.memory_sizes import four_bit_bytes
from ratoon.rollout.engines.shared_weights import twin_of
from ratoon.trainer import MasterOptimizer
from ratoon.trainer.model_folder import save_model
from ratoon.types import Prompt, Response, RolloutGroup

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (41 MiB, extra `qlora`), which CI does without")

SMALL = FreshModelConfig(hidden_size=36, intermediate_size=50, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=18)
LORA = LoraConfig(rank=2, alpha=4)
LAYOUT = pack_sequences([[3, 4, 5, 6, 90], [3, 4, 7]])

# The 16 values of NF4, quantiles of the normal distribution (arXiv:2305.14314, appendix E).
NF4 = torch.tensor(
    [
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip


def config(dtype: Dtype = "float32") -> ModelConfig:
    return ModelConfig(fresh=SMALL, lora=LORA, dtype=dtype, quantization="nf4")


def nearest_nf4(weight_KC: Tensor) -> Tensor:
    """Blocks of 64 in float64, each element the nearest value times the block's largest magnitude."""
    flat = weight_KC.detach().double().flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * scales).flatten()[: len(flat)].view_as(weight_KC)


def rounded_twin(dtype: Dtype) -> PreTrainedModel:
    """An ordinary policy with adapters whose base has the rounded values."""
    model, _ = build_fresh(SMALL, 5)
    cast_weights(model, getattr(torch, dtype))
    round_weights(model)
    return add_adapters(attach(model), LORA, seed=5)


@torch.no_grad()
def move(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def score(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return forward_logprobs(model, LAYOUT)[0]


def test_weights_are_rounded_to_the_nearest_value_of_their_block():
    """Sizes that are no multiple of a block; embedding, head and norms stay."""
    model, _ = build_fresh(SMALL, 5)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    round_weights(model)
    for name, value in model.named_parameters():
        expected = before[name]
        if name.endswith("_proj.weight"):
            expected = nearest_nf4(expected).float()
            assert not torch.equal(value, before[name])
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_and_gradients_are_those_of_the_rounded_weights(dtype: Dtype):
    model, plain = build_policy(config(dtype), seed=5), rounded_twin(dtype)
    move(model)
    adapters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert plain.load_state_dict(adapters, strict=False).unexpected_keys == []
    scores: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for policy in (model, plain):
        logprobs_M, entropy_M = forward_logprobs(policy, LAYOUT)
        (logprobs_M.sum() + 0.1 * entropy_M.sum()).backward()
        scores.append(logprobs_M.detach())
        trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
        assert all("lora_" in name and parameter.dtype == policy.dtype for name, parameter in trained.items())
        gradients.append({name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None})
        assert gradients[-1].keys() == trained.keys()
    tolerance = 1e-6 if dtype == "float32" else 1e-3
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=tolerance)
    for name, gradient in gradients[0].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=10 * tolerance * largest)
    unrounded = build_policy(ModelConfig(fresh=SMALL, lora=LORA, dtype=dtype), seed=5)
    unrounded.load_state_dict(adapters, strict=False)
    assert (score(unrounded) - scores[0]).abs().max() > 3 * tolerance, "rounding shows"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_resumes_and_merges_into_the_rounded_base(dtype: Dtype, tmp_path: Path):
    model = build_policy(config(dtype), seed=5)
    move(model)
    save_model(model, None, tmp_path)
    again = build_policy(config(dtype), seed=5, checkpoint=tmp_path)
    assert torch.equal(score(again), score(model))
    merged = attach(load_merged(tmp_path))
    torch.testing.assert_close(score(merged), score(model), rtol=0, atol=1e-5 if dtype == "float32" else 0.1)


def test_a_twin_samples_from_the_same_codes_and_the_frozen_ones_stay():
    """A rollout engine's twin sees every update of the adapters; adapters off are the rounded base."""
    model = build_policy(config(), seed=5)
    twin = twin_of(model, "sdpa")
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        assert tensor is tensors[name]
    frozen = {name: tensor.clone() for name, tensor in tensors.items() if not tensor.requires_grad}
    base = score(model)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    for _ in range(3):
        forward_logprobs(model, LAYOUT)[0].sum().backward()
        optimizer.accumulate()
        optimizer.step(learning_rate=0.1, max_grad_norm=1.0)
    ids = torch.tensor([[3, 4, 5, 6, 90]])
    with torch.no_grad():
        logprobs = twin(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs, score(model)[:4], rtol=0, atol=1e-5)
    assert (score(model) - base).abs().max() > 0.05, "the updates show"
    with adapters_off(model):
        assert torch.equal(score(model), base)
    for name, tensor in frozen.items():
        assert torch.equal(tensors[name], tensor), name


def test_a_shared_prompt_counts_as_if_repeated():
    model = build_policy(config(), seed=5)
    move(model)
    prompt, responses = [3, 4, 5, 6], ([7, 8, 9], [10], [11, 12])
    made = tuple(Response(np.array(response)) for response in responses)
    group = RolloutGroup(Prompt("a", np.array(prompt)), made)
    with torch.no_grad():
        shared_M, _ = forward_logprobs(model, pack_groups([group]))
        alone = [forward_logprobs(model, pack_sequences([[*prompt, *response]]))[0][3:] for response in responses]
    torch.testing.assert_close(shared_M, torch.cat(alone), rtol=0, atol=1e-5)


def test_bytes_and_counts():
    model, preview = build_policy(config(), seed=5), preview_model(config())
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert preview.num_quantised == sum(layer.num_weights for layer in layers)
    for layer in layers:
        held = layer.weight.nbytes + layer.weight_scales.nbytes
        assert held == four_bit_bytes(layer.num_weights)
    assert preview.num_parameters is not None and preview.num_trained is not None
    assert count_weights(model) == preview.num_parameters + preview.num_trained
    assert f"{preview.num_trained:,} of {count_weights(model):,} parameters" in describe_adapters(model)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_compute_the_same(dtype: Dtype):
    plain = build_policy(config(dtype), seed=5)
    compiled = build_policy(config(dtype).model_copy(update={"compile": "layers"}), seed=5)
    gradients: list[Tensor] = []
    for policy in (plain, compiled):
        move(policy)
        forward_logprobs(policy, LAYOUT)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None]))
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    torch.testing.assert_close(gradients[0], gradients[1], rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_a_gpu_rounds_as_the_cpu_does():
    here, _ = build_fresh(SMALL, 5)
    there, _ = build_fresh(SMALL, 5)
    quantise(there, torch.device("cuda"))
    round_weights(here)
    for name, layer in there.named_modules():
        if isinstance(layer, QuantisedLinear):
            weight_KC = layer(torch.eye(layer.in_features, device="cuda")).T.cpu()
            torch.testing.assert_close(weight_KC, here.get_submodule(name).weight, rtol=1e-3, atol=1e-4)
