"""Qwen3 decoders with random weights, made on the device: nothing is downloaded."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from ratoon.bench.policy_update.cases import Decoder
from ratoon.models import attach

_SEED = 0
_MAX_POSITIONS = 40_960
_ROPE_THETA = 1e6


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


def build_model(decoder: Decoder, device: torch.device) -> PreTrainedModel:
    """Attached, for evaluation (the layers have nothing that training would make random): bf16 on a GPU, float32 on a
    CPU. The weights follow the sizes alone, and the global random state stays as it was."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(decoder_config(decoder), dtype=dtype)
    return attach(model.eval())


def cut_copy(model: PreTrainedModel, num_layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """A plain transformers model of the first layers: eager attention and experts, weights of its own in `dtype`."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": num_layers, "layer_types": None})
    with model.device:
        copy = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    weights = model.state_dict()
    copy.load_state_dict({name: weights[name] for name in copy.state_dict()})
    return copy.eval()
