"""Models that are wrong are refused from their files' headers, in one sentence that names them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AddedToken, PreTrainedConfig, PreTrainedModel

from ratoon.models import (
    FreshModelConfig,
    LoraConfig,
    ModelConfig,
    build_fresh,
    check_token_ids,
    check_vocabulary,
    load_tokenizer,
    preview_model,
)
from ratoon.models.preview import ModelPreview
from ratoon.types import Prompt, UserError

SMALL = FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = build_fresh(SMALL, seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch):
    """Nothing here may load a model."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))


def preview(folder: Path, **settings: Any) -> ModelPreview:
    return preview_model(ModelConfig(path=str(folder), **settings))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        preview(folder, **settings)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 800
    return text


@pytest.mark.parametrize("tied", [True, False])
def test_sizes(tied: bool, tmp_path: Path):
    """Of a folder as of the fresh model in it."""
    fresh = SMALL.model_copy(update={"tied_embeddings": tied})
    model, _ = build_fresh(fresh, seed=0)
    model.save_pretrained(tmp_path)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    before = torch.get_rng_state()
    for found in (preview(tmp_path), preview_model(ModelConfig(fresh=fresh))):
        assert found.num_parameters == found.num_trained == num_parameters
        assert (found.shape.num_layers, found.shape.vocab_size, found.shape.tied_embeddings) == (2, 99, tied)
    assert torch.equal(torch.get_rng_state(), before)
    with_adapters = preview(tmp_path, lora=LoraConfig(rank=2, target_modules=("q_proj", "up_proj")))
    assert with_adapters.num_parameters == num_parameters
    assert with_adapters.num_trained == 2 * 2 * ((16 + 16) + (16 + 24))


def write_config(folder: Path, config: PreTrainedConfig) -> None:
    """A folder of the right form: only its configuration tells that it will not do."""
    folder.mkdir()
    config.save_pretrained(folder)
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("T5Config", {}, "'t5' cannot be trained on shared prompts: it is an encoder-decoder"),
        ("BartConfig", {}, "it is an encoder-decoder"),
        ("BertConfig", {}, "'bert' cannot be trained on shared prompts: it is an encoder, whose attention is bidir"),
        ("XLMRobertaConfig", {}, "'xlm-roberta' cannot be trained on shared prompts: it is an encoder"),
        ("ModernBertConfig", {}, "it is an encoder"),
        ("DistilBertConfig", {}, "it is an encoder"),
        ("Qwen2VLConfig", {}, "it is multimodal (vision_config), and only text is supported"),
        ("Gemma3Config", {}, "it is multimodal"),
        ("MambaConfig", {}, "mix tokens by recurrence or convolution"),
        ("Qwen3NextConfig", {}, "mix tokens by recurrence or convolution"),
        ("ViTConfig", {}, "'vit', which has no causal language model in transformers; use a decoder-only model"),
        ("GPTJConfig", {"attn_pdrop": 0}, "does not go through transformers' AttentionInterface"),
        ("GPT2Config", {"attn_pdrop": 0, "n_layer": 1}, "its dropout 'transformer.drop' is on (p=0.1)"),
    ],
)
def test_architectures_that_cannot_share_prompts(name: str, settings: dict[str, Any], words: str, tmp_path: Path):
    write_config(tmp_path / "model", getattr(transformers, name)(**settings))
    assert words in refusal(tmp_path / "model")


def test_dynamic_rope_unless_it_is_fixed(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    assert "model.rope_positions" in refusal(folder)
    preview(folder, rope_positions=64)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "homemade"}, "'homemade', which this version of transformers does not know"),
        ({"num_attention_heads": 0}, "the configuration in "),
        ({"vocab_size": "many"}, "the configuration in "),
        ({"layer_types": ["full_attention"]}, "the configuration in "),
    ],
)
def test_configurations_that_make_no_model(changed: dict[str, Any], words: str, folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert words in refusal(folder) and str(folder) in refusal(folder)


def test_adapters_that_the_model_cannot_have(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert "'lm_head' is the output head" in refusal(folder, lora=LoraConfig(target_modules=("lm_head",)))
    monkeypatch.setattr("ratoon.models.adapters.find_spec", lambda name: None)
    assert 'pip install -e ".[lora]"' in refusal(folder, lora=LoraConfig())


def test_shards(folder: Path):
    """The index names a file that is not there, or a tensor that its file does not hold."""
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    assert f"holds {shard}, but neither model.safetensors nor model.safetensors.index.json" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    preview(folder)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard, "model.layers.9.weight": shard}}))
    assert f"{shard}' lacks 1 of the tensors that the index says it holds, first model.layers.9" in refusal(folder)


def test_a_folder_without_a_tokenizer(folder: Path):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"model' holds no tokenizer \(tokenizer.json, tokenizer_config.json, "):
        load_tokenizer(folder)


def test_a_tokenizer_of_a_larger_model(folder: Path):
    vocab_size = preview(folder).shape.vocab_size
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, vocab_size)
    check_vocabulary(tokenizer, vocab_size + 29)  # padded, for fast matrix products
    _, larger = build_fresh(SMALL.model_copy(update={"alphabet": SMALL.alphabet + "äöü"}), seed=0)
    with pytest.raises(
        UserError,
        match=r"the tokenizer has 102 tokens, and the model's vocabulary 99: 3 tokens have no weights, for example "
        r"'ü' with id 101",
    ):
        check_vocabulary(larger, vocab_size)


def test_a_special_token_beyond_the_vocabulary():
    """Gemma 3's tokenizer has one for images, which its text models have no weights for. EOS must have some."""
    _, tokenizer = build_fresh(SMALL, seed=0)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    check_vocabulary(tokenizer, 99)
    tokenizer.eos_token = "<image>"
    with pytest.raises(UserError, match=r"'<image>' with id 99"):
        check_vocabulary(tokenizer, 99)
    prompts = [Prompt("rows.jsonl:1", np.array([5, 98])), Prompt("rows.jsonl:2", np.array([99, 3]))]
    check_token_ids(prompts[:1], 99)
    with pytest.raises(UserError, match=r"rows.jsonl:2: token id 99 is outside the model's vocabulary of 99"):
        check_token_ids(prompts, 99)
