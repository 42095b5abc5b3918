"""Qwen3 and SmolLM2 decoders with random weights, made on the device: nothing is downloaded."""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ratoon.bench.policy_update.cases import Decoder
from ratoon.models import LoraConfig, add_adapters, attach

_SEED = 0
_MAX_POSITIONS = 40_960
_ROPE_THETA = 1e6
_ADAPTER_STD = 0.02


def decoder_config(decoder: Decoder) -> PreTrainedConfig:
    """The transformers configuration of these sizes."""
    sizes = {
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "tie_word_embeddings": decoder.tied_embeddings,
        "max_position_embeddings": _MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
    }
    if not decoder.num_experts:
        return Qwen3Config(intermediate_size=decoder.intermediate_size, **sizes)
    return Qwen3MoeConfig(
        moe_intermediate_size=decoder.intermediate_size,
        num_experts=decoder.num_experts,
        num_experts_per_tok=decoder.experts_per_token,
        norm_topk_prob=True,
        **sizes,
    )


def smollm2_config() -> PreTrainedConfig:
    """SmolLM2-135M, as published."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )


def build_model(decoder: Decoder, device: torch.device, *, lora_rank: int = 0) -> PreTrainedModel:
    """Attached, for evaluation (the layers have nothing that training would make random): bf16 on a GPU, float32 on a
    CPU. The weights follow the sizes alone, and the global random state stays as it was.

    lora_rank: of adapters beside all linear layers, whose weights are then frozen. Raises UserError without peft.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(_SEED)
        model = attach(AutoModelForCausalLM.from_config(decoder_config(decoder), dtype=dtype))
        if lora_rank:
            add_adapters(model, LoraConfig(rank=lora_rank), seed=_SEED)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # at 0, as they begin, the first matrices would have no gradient to compare
                    nn.init.normal_(parameter, std=_ADAPTER_STD)
    return model.eval()


def cut_copy(model: PreTrainedModel, num_layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """A plain transformers model of the first layers, with the model's adapters if it has some: eager attention and
    experts, weights of its own in `dtype`."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None})
    with model.device:
        copy = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        if lora_rank := _adapter_rank(model):
            add_adapters(copy, LoraConfig(rank=lora_rank), seed=_SEED)
    weights = model.state_dict()
    copy.load_state_dict({name: weights[name] for name in copy.state_dict()})
    return copy.eval()


def _adapter_rank(model: nn.Module) -> int:
    """0 without adapters."""
    return next((parameter.shape[0] for name, parameter in model.named_parameters() if "lora_A" in name), 0)
