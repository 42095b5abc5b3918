"""Policies as recipes name them: fresh or from a folder, whole or with adapters, begun or resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ratoon.layout import pack_sequences
from ratoon.models import (
    FreshModelConfig,
    LoraConfig,
    ModelConfig,
    adapters_off,
    align_eos,
    build_fresh,
    build_policy,
    forward_logprobs,
    has_adapters,
    load_merged,
)
from ratoon.models.config import Dtype
from ratoon.trainer.model_folder import save_model
from ratoon.types import UserError

SMALL = FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
LAYOUT = pack_sequences([[3, 4, 5, 6, 90], [3, 4, 7]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = build_fresh(SMALL, seed=8)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def config_of(kind: str, folder: Path, *, lora: bool = True, dtype: Dtype = "float32") -> ModelConfig:
    return ModelConfig(
        path=str(folder) if kind == "path" else None,
        fresh=SMALL if kind == "fresh" else None,
        lora=LoraConfig(rank=2, alpha=4) if lora else None,
        dtype=dtype,
    )


@torch.no_grad()
def move(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def score(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return forward_logprobs(model, LAYOUT)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("kind", ["path", "fresh"])
def test_a_checkpoint_is_the_policy_bit_by_bit(kind: str, lora: bool, dtype: Dtype, folder: Path, tmp_path: Path):
    config = config_of(kind, folder, lora=lora, dtype=dtype)
    model = build_policy(config, seed=5)
    assert has_adapters(model) == lora and model.dtype == getattr(torch, dtype)
    move(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_model(model, tokenizer, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "config.json").exists() != lora
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint")("ab")["input_ids"] == tokenizer("ab")["input_ids"]

    again = build_policy(config, seed=5, checkpoint=tmp_path / "checkpoint")
    saved = dict(model.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, saved[name]) and parameter.requires_grad == saved[name].requires_grad, name
    assert torch.equal(score(again), score(model))


def test_rotary_frequencies_of_16_bit_fresh_models_are_of_32_bits():
    model = build_policy(ModelConfig(fresh=SMALL, dtype="bfloat16"), seed=0)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_new_adapters_leave_the_base_as_it_is(folder: Path):
    plain = build_policy(config_of("path", folder, lora=False), seed=5)
    model = build_policy(config_of("path", folder), seed=5)
    assert torch.equal(score(model), score(plain))
    move(model)
    assert not torch.allclose(score(model), score(plain))
    with adapters_off(model):
        assert torch.equal(score(model), score(plain))


@pytest.mark.parametrize("kind", ["path", "fresh"])
def test_other_tools_read_the_adapters(kind: str, folder: Path, tmp_path: Path):
    """By peft, and by transformers, which takes the base from the file."""
    model = build_policy(config_of(kind, folder), seed=5)
    move(model)
    save_model(model, None, tmp_path / "checkpoint")
    base = build_fresh(SMALL, 5)[0] if kind == "fresh" else AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[3, 4, 5, 6, 90]])
    own = score(model)[:4]
    readers: list[Any] = [PeftModel.from_pretrained(base, tmp_path / "checkpoint")]
    if kind == "path":
        named = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(named) == folder.resolve()
        readers.append(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint"))
    for reader in readers:
        with torch.no_grad():
            logprobs = reader(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logprobs, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["path", "fresh"])
def test_merged(kind: str, folder: Path, tmp_path: Path):
    model = build_policy(config_of(kind, folder), seed=5)
    move(model)
    save_model(model, None, tmp_path / "checkpoint")
    merged = load_merged(tmp_path / "checkpoint")
    assert not has_adapters(merged)
    align_eos(merged, AutoTokenizer.from_pretrained(folder))
    merged.save_pretrained(tmp_path / "merged")
    again = build_policy(ModelConfig(path=str(tmp_path / "merged")), seed=0)
    torch.testing.assert_close(score(again), score(model), rtol=0, atol=1e-5)


def test_a_base_that_moved_is_gone_or_is_another(folder: Path, tmp_path: Path):
    config = config_of("path", folder)
    model = build_policy(config, seed=5)
    move(model)
    save_model(model, None, tmp_path / "checkpoint")
    folder.rename(tmp_path / "elsewhere")
    save_model(model, None, tmp_path / "later")  # a run goes on without it
    with pytest.raises(UserError, match=r"model folder '.*base' does not exist"):
        load_merged(tmp_path / "checkpoint")
    load_merged(tmp_path / "checkpoint", base_path=str(tmp_path / "elsewhere"))

    other, tokenizer = build_fresh(SMALL, seed=9)  # same sizes, other weights
    other.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for load in (
        lambda: load_merged(tmp_path / "checkpoint"),
        lambda: build_policy(config, seed=5, checkpoint=tmp_path / "checkpoint"),
    ):
        with pytest.raises(UserError, match=r"base' are not those that the adapter was trained on"):
            load()
    fresh = config_of("fresh", folder)
    save_model(build_policy(fresh, seed=5), None, tmp_path / "fresh")
    with pytest.raises(UserError, match=r"the weights of model.fresh are not those that the adapter was trained on"):
        build_policy(fresh, seed=6, checkpoint=tmp_path / "fresh")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": 3}, r"does not fit the model: 28 of its tensors .* shape"),
        ({"target_modules": ("q_proj",)}, r"does not fit the model: 24 of its tensors are missing"),
    ],
)
def test_adapters_of_another_recipe(changed: dict[str, object], words: str, folder: Path, tmp_path: Path):
    config = config_of("path", folder)
    save_model(build_policy(config, seed=5), None, tmp_path / "checkpoint")
    assert config.lora is not None
    other = config.model_copy(update={"lora": config.lora.model_copy(update=changed)})
    with pytest.raises(UserError, match=words):
        build_policy(other, seed=5, checkpoint=tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "base_model.json"])
def test_a_damaged_checkpoint(name: str, folder: Path, tmp_path: Path):
    config = config_of("path", folder)
    save_model(build_policy(config, seed=5), None, tmp_path / "checkpoint")
    for content in (b"", b"{}", None):
        (tmp_path / "checkpoint" / name).unlink()
        if content is not None:
            (tmp_path / "checkpoint" / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            build_policy(config, seed=5, checkpoint=tmp_path / "checkpoint")
        assert "checkpoint" in str(caught.value)


def test_an_adapter_is_no_model_folder(folder: Path, tmp_path: Path):
    """transformers would load a folder that holds both with the adapter in it, frozen or not as it likes."""
    save_model(build_policy(config_of("path", folder), seed=5), None, tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"holds an adapter .*merge it into its base first \(ratoon export"):
        build_policy(ModelConfig(path=str(tmp_path / "checkpoint")), seed=0)
    shutil.copyfile(tmp_path / "checkpoint" / "adapter_config.json", folder / "adapter_config.json")
    with pytest.raises(UserError, match=r"holds an adapter"):
        build_policy(ModelConfig(path=str(folder)), seed=0)
