"""A decoder's sizes from its transformers configuration."""

from transformers import PreTrainedConfig

from ratoon.models.settings import setting
from ratoon.types import ModelShape, UserError


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """The sizes that FLOP and memory counters need. Raises UserError where the configuration lacks one."""
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_experts = setting(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    expert_width = setting(config, "moe_intermediate_size") if num_experts else None
    return ModelShape(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=setting(config, "num_key_value_heads") or num_heads,
        head_dim=setting(config, "head_dim") or hidden_size // num_heads,
        vocab_size=_count(config, "vocab_size"),
        intermediate_size=expert_width or setting(config, "intermediate_size", "n_inner") or 4 * hidden_size,
        num_experts=num_experts,
        experts_per_token=(setting(config, "num_experts_per_tok") or 0) if num_experts else 0,
        tied_embeddings=bool(setting(config, "tie_word_embeddings")),
        windows=layer_windows(config),
    )


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """[L] window of each layer in tokens, None where attention is global; empty where every layer's is."""
    window = setting(config, "sliding_window")
    num_layers = _count(config, "num_hidden_layers")
    if window is None:
        return ()
    layer_types = setting(config, "layer_types")
    if layer_types is None:
        return (window,) * num_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return windows if any(windows) else ()


def _count(config: PreTrainedConfig, name: str) -> int:
    value = setting(config, name)
    if not isinstance(value, int):
        raise UserError(
            f"the configuration of {config.model_type!r} has no whole number {name!r} (got {value!r}); "
            "its size cannot be read, so it cannot be trained"
        )
    return value
