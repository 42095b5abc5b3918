"""Transformers decoders that run packed layouts: loading, attaching, and scoring tokens."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.models.attachment import attach
    from ratoon.models.config import FreshModelConfig, ModelConfig
    from ratoon.models.forest import Forest
    from ratoon.models.forward import forward_logprobs
    from ratoon.models.fresh import build_fresh
    from ratoon.models.interface import attention_choices, stock_attention
    from ratoon.models.load import align_eos, load_policy, load_tokenizer
    from ratoon.models.model_files import resolve_model_path
    from ratoon.models.recompute import set_recompute
    from ratoon.models.rope import fix_rope
    from ratoon.models.shape import model_shape

_HOMES = {
    "Forest": "forest",
    "FreshModelConfig": "config",
    "ModelConfig": "config",
    "align_eos": "load",
    "attach": "attachment",
    "attention_choices": "interface",
    "build_fresh": "fresh",
    "fix_rope": "rope",
    "forward_logprobs": "forward",
    "load_policy": "load",
    "load_tokenizer": "load",
    "model_shape": "shape",
    "resolve_model_path": "model_files",
    "set_recompute": "recompute",
    "stock_attention": "interface",
}

__all__ = [
    "Forest",
    "FreshModelConfig",
    "ModelConfig",
    "align_eos",
    "attach",
    "attention_choices",
    "build_fresh",
    "fix_rope",
    "forward_logprobs",
    "load_policy",
    "load_tokenizer",
    "model_shape",
    "resolve_model_path",
    "set_recompute",
    "stock_attention",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
