"""Tiny random models of every family, and the mode in which float64 stays float64."""

# Shape letters: T rows, M scored tokens, N sequences, V vocabulary.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from ratoon.layout import PackedLayout

VOCAB_SIZE = 37

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
# A window smaller than most sequences here.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}
NO_YARN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@dataclass(frozen=True, slots=True)
class Family:
    """A family, and what of it one implementation or another cannot do."""

    build_config: Callable[[], PreTrainedConfig]

    flash: bool = True
    """The flash kernels have all it needs (neither window nor softcap)."""

    is_dense: bool = True


FAMILIES = {
    "llama": Family(lambda: LlamaConfig(**SIZES)),
    "qwen2": Family(lambda: Qwen2Config(**SIZES)),
    "qwen3": Family(lambda: Qwen3Config(**SIZES)),
    "mistral": Family(lambda: MistralConfig(**SIZES, sliding_window=4), flash=False),
    "gemma2": Family(
        lambda: Gemma2Config(
            **SIZES | HYBRID, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8
        ),
        flash=False,
    ),
    "gemma3": Family(lambda: Gemma3TextConfig(**SIZES | HYBRID, query_pre_attn_scalar=8), flash=False),
    "phi3": Family(lambda: Phi3Config(**{key: value for key, value in SIZES.items() if key != "head_dim"})),
    "olmo2": Family(lambda: Olmo2Config(**SIZES)),
    "mixtral": Family(lambda: MixtralConfig(**SIZES, **EXPERTS), is_dense=False),
    "qwen3_moe": Family(
        lambda: Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20),
        is_dense=False,
    ),
    "gpt_oss": Family(lambda: GptOssConfig(**SIZES | HYBRID | EXPERTS | NO_YARN), flash=False, is_dense=False),
}
"""The families whose support is promised."""

EXTRAS = {
    "cohere": Family(lambda: CohereConfig(**SIZES, logit_scale=0.25)),
    "glm4": Family(lambda: Glm4Config(**SIZES)),
    "granite": Family(lambda: GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2)),
    "smollm3": Family(lambda: SmolLM3Config(**SIZES)),
    "starcoder2": Family(lambda: Starcoder2Config(**SIZES, sliding_window=4), flash=False),
}
"""Others, which the check at attach time accepts."""

ALL_FAMILIES = FAMILIES | EXTRAS


def build_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of the family with sinks, biases and norms away from their initial zeros and ones."""
    config = ALL_FAMILIES[name].build_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # grouped_mm, the default of mixtures of experts, has no float64.
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    return model.to(dtype=dtype)


class _KeepFloat64(TorchFunctionMode):
    """Turns transformers' casts to float32 (norms, rotary, softmax, router) into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def kept_in_float64() -> Iterator[None]:
    """Transformers computes norms, rotary, softmax and routers in float32 even in a float64 model, which would end
    every comparison at 1e-8. Both sides of a comparison run inside; so does the backward pass, for recomputation."""
    with _KeepFloat64():
        yield


def backward(loss: Tensor) -> None:
    """`loss.backward()` that stays in the mode: torch's own calls leave a TorchFunctionMode while the engine runs,
    and what it recomputes would be float32 again."""
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def stock_logprobs(model: PreTrainedModel, sequence: np.ndarray) -> Tensor:
    """[length - 1] log-probs of every token but the first, by the whole model on one sequence, from full logits."""
    ids = torch.tensor(sequence)[None]
    logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    return logits_TV.log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]


def sequence_ids(layout: PackedLayout, sequence: int) -> np.ndarray:
    return layout.token_ids_T[layout.sequence_rows(sequence)]


def reference_logprobs(model: PreTrainedModel, layout: PackedLayout) -> Tensor:
    """[M] one forward pass per sequence; the model must run its stock attention."""
    parts = []
    for sequence in range(layout.num_sequences):
        is_its_M = layout.sequence_of_M == sequence
        if not is_its_M.any():
            continue
        logprobs = stock_logprobs(model, sequence_ids(layout, sequence))
        # The token scored at position p + 1 stands at place p.
        parts.append(logprobs[torch.tensor(layout.positions_T[layout.predictor_row_M[is_its_M]].astype(np.int64))])
    return torch.cat(parts)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter's gradient, zeros where it has none; clears them."""
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return found
