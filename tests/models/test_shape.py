"""Sizes read from transformers configurations."""

import pytest
from tests.parity.families import ALL_FAMILIES, build_model
from transformers import GPT2Config, MambaConfig, PreTrainedConfig

from ratoon.models import build_fresh, model_shape
from ratoon.models.config import FreshModelConfig
from ratoon.types import UserError


def test_dense_sizes_count_the_parameters():
    model, _ = build_fresh(FreshModelConfig(), seed=0)
    shape = model_shape(model.config)
    matrices = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".layers." in name and parameter.ndim == 2
    )
    assert shape.active_parameters == matrices
    assert (shape.num_kv_heads, shape.head_dim, shape.tied_embeddings, shape.windows) == (2, 32, True, ())


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", ()),
        ("mistral", (4, 4)),
        ("gemma2", (4, None, 4)),
        ("gemma3", (4, None, 4)),
        ("gpt_oss", (4, None, 4)),
        ("qwen2", ()),
    ],
)
def test_windows_of_each_layer(name: str, windows: tuple[int | None, ...]):
    assert model_shape(ALL_FAMILIES[name].build_config()).windows == windows


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts(name: str):
    shape = model_shape(build_model(name).config)
    assert (shape.num_experts, shape.experts_per_token) == (4, 2)
    assert shape.intermediate_size == (20 if name == "qwen3_moe" else 28)


def test_names_of_older_families():
    shape = model_shape(GPT2Config(n_embd=24, n_layer=3, n_head=4))
    assert (shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (24, 3, 4, 4)
    assert (shape.head_dim, shape.intermediate_size) == (6, 96)


@pytest.mark.parametrize("config", [MambaConfig(), PreTrainedConfig()])
def test_a_configuration_without_attention_sizes(config: PreTrainedConfig):
    with pytest.raises(UserError, match="no whole number"):
        model_shape(config)
