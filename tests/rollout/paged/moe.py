"""Tiny mixtures of experts, and what their routers choose in one plain pass over a whole sequence."""

# Shape letters: T tokens of one sequence, L layers, K experts per token.

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from tests.rollout.tiny import EOS, VOCAB
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "pad_token_id": EOS + 1,
    "bos_token_id": None,
    "attn_implementation": "eager",
}


@cache
def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    return in_float64(MixtralForCausalLM(config))


@cache
def qwen3_moe() -> PreTrainedModel:
    """The second of its three layers is dense."""
    torch.manual_seed(1)
    sizes = {**SIZES, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**sizes, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=16)
    return in_float64(Qwen3MoeForCausalLM(config))


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(2)
    config = GptOssConfig(**SIZES, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    return GptOssForCausalLM(config).eval()


def deepseek_v3() -> PreTrainedModel:
    """The first of its layers is dense."""
    torch.manual_seed(3)
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 8},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config).eval()


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Where no two experts are as good as equal, so that rounding chooses none."""
    model.set_experts_implementation("eager")  # torch multiplies no groups of doubles
    return model.double().eval()


def plain_routes(model: PreTrainedModel, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[T, L, K] by one pass of the model as it is, seen at the modules that its decoder layers name; -1 where dense."""
    found: dict[int, torch.Tensor] = {}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            hooks.append(
                layer.mlp.experts.register_forward_pre_hook(
                    lambda _, args, index=index: found.update({index: args[1].clone()})
                )
            )
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor(np.asarray(token_ids))[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    like_TK = next(iter(found.values()))
    layers = [found.get(index, torch.full_like(like_TK, -1)) for index in range(len(model.model.layers))]
    return torch.stack(layers, dim=1).cpu().numpy()
