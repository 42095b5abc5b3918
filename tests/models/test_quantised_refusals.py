"""What weights in 4 bits do not go with, said before any weight is read; the library need not be there."""

import re

import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ratoon.models import FreshModelConfig, LoraConfig, ModelConfig
from ratoon.models.preview import preview_model
from ratoon.models.quantised import quantisable
from ratoon.types import UserError


def test_rounded_weights_need_adapters():
    with pytest.raises(ValidationError, match=re.escape("give adapters, [model.lora]")):
        ModelConfig(fresh=FreshModelConfig(), quantization="nf4")


def test_experts_are_refused():
    settings = Qwen3MoeConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, moe_intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(settings)
    with pytest.raises(UserError, match="the 3 experts of Qwen3MoeForCausalLM"):
        list(quantisable(model))


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.models.quantised.find_spec", lambda name: None)
    config = ModelConfig(fresh=FreshModelConfig(), lora=LoraConfig(), quantization="nf4")
    with pytest.raises(UserError, match=re.escape('bitsandbytes package: pip install -e ".[qlora]"')):
        preview_model(config)
