"""Transformers decoders that run packed layouts: loading, attaching, and scoring tokens."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.models.adapters import (
        adapters_as,
        adapters_off,
        add_adapters,
        are_adapters_off,
        describe_adapters,
        has_adapters,
        read_adapters,
    )
    from ratoon.models.attachment import attach
    from ratoon.models.base_model import FrozenBase
    from ratoon.models.compiled import is_compiled, set_compile
    from ratoon.models.config import FreshModelConfig, LoraConfig, ModelConfig
    from ratoon.models.forest import Forest
    from ratoon.models.forward import forward_logprobs
    from ratoon.models.fresh import build_fresh, fresh_tokenizer
    from ratoon.models.interface import attention_choices, stock_attention
    from ratoon.models.kept_prompt import KeptPrompt, can_keep_prompts
    from ratoon.models.load import align_eos, load_policy, load_tokenizer
    from ratoon.models.model_files import resolve_model_path
    from ratoon.models.policy import build_policy, load_merged, save_policy_adapters
    from ratoon.models.preview import ModelPreview, check_token_ids, check_vocabulary, preview_model
    from ratoon.models.recompute import set_recompute
    from ratoon.models.rope import fix_rope
    from ratoon.models.sequence_parallel import check_sequence_parallel, sequence_group_of, set_sequence_parallel
    from ratoon.models.shape import model_shape

_HOMES = {
    "Forest": "forest",
    "FreshModelConfig": "config",
    "FrozenBase": "base_model",
    "KeptPrompt": "kept_prompt",
    "LoraConfig": "config",
    "ModelConfig": "config",
    "ModelPreview": "preview",
    "adapters_as": "adapters",
    "adapters_off": "adapters",
    "add_adapters": "adapters",
    "align_eos": "load",
    "are_adapters_off": "adapters",
    "attach": "attachment",
    "attention_choices": "interface",
    "build_fresh": "fresh",
    "build_policy": "policy",
    "can_keep_prompts": "kept_prompt",
    "check_sequence_parallel": "sequence_parallel",
    "check_token_ids": "preview",
    "check_vocabulary": "preview",
    "describe_adapters": "adapters",
    "fix_rope": "rope",
    "forward_logprobs": "forward",
    "fresh_tokenizer": "fresh",
    "has_adapters": "adapters",
    "is_compiled": "compiled",
    "load_merged": "policy",
    "load_policy": "load",
    "load_tokenizer": "load",
    "model_shape": "shape",
    "preview_model": "preview",
    "read_adapters": "adapters",
    "resolve_model_path": "model_files",
    "save_policy_adapters": "policy",
    "set_compile": "compiled",
    "set_recompute": "recompute",
    "sequence_group_of": "sequence_parallel",
    "set_sequence_parallel": "sequence_parallel",
    "stock_attention": "interface",
}

__all__ = [
    "Forest",
    "FreshModelConfig",
    "FrozenBase",
    "KeptPrompt",
    "LoraConfig",
    "ModelConfig",
    "ModelPreview",
    "adapters_as",
    "adapters_off",
    "add_adapters",
    "align_eos",
    "are_adapters_off",
    "attach",
    "attention_choices",
    "build_fresh",
    "build_policy",
    "can_keep_prompts",
    "check_sequence_parallel",
    "check_token_ids",
    "check_vocabulary",
    "describe_adapters",
    "fix_rope",
    "forward_logprobs",
    "fresh_tokenizer",
    "has_adapters",
    "is_compiled",
    "load_merged",
    "load_policy",
    "load_tokenizer",
    "model_shape",
    "preview_model",
    "read_adapters",
    "resolve_model_path",
    "save_policy_adapters",
    "sequence_group_of",
    "set_compile",
    "set_recompute",
    "set_sequence_parallel",
    "stock_attention",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
