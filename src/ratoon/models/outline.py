"""What a recipe's model will ask of attention and memory, from its configuration alone."""

from collections import Counter
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ratoon.attention import AttentionRequest
from ratoon.attention.request import Feature
from ratoon.models.config import ModelConfig
from ratoon.models.fresh import fresh_config
from ratoon.models.load import DTYPES, load_config
from ratoon.models.model_files import resolve_model_path
from ratoon.models.settings import setting
from ratoon.models.shape import layer_windows, model_shape

_QK_NORM_TYPES = frozenset(
    {
        "afmoe",
        "apertus",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma3_text",
        "glm4_moe",
        "nanochat",
        "olmo2",
        "olmo3",
        "olmoe",
        "qwen3",
        "qwen3_moe",
    }
)
_SINK_TYPES = frozenset({"gpt_oss"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What some layers ask of their attention."""

    window: int | None
    """None where attention is global, or where no sequence outgrows the window."""

    num_layers: int
    request: AttentionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """Beside a model's sizes (`preview_model`)."""

    model_type: str

    max_positions: int | None
    """The longest sequence its configuration names; rotary models run longer ones, and worse."""

    has_qk_norm: bool
    layers: tuple[LayerKind, ...]


def outline_model(config: ModelConfig, *, device_type: str, longest_sequence: int) -> ModelOutline:
    """Reads the model's configuration. Raises UserError as `load_policy` does for one that cannot be trained.

    longest_sequence: tokens of the longest prompt with its longest response.
    """
    found = _configuration(config)
    return ModelOutline(
        model_type=found.model_type,
        max_positions=setting(found, "max_position_embeddings", "n_positions"),
        has_qk_norm=found.model_type in _QK_NORM_TYPES,
        layers=_layer_kinds(found, config, device_type, longest_sequence),
    )


def _configuration(config: ModelConfig) -> PreTrainedConfig:
    if config.fresh is not None:
        return fresh_config(config.fresh)
    assert config.path is not None, "a model config has a path or is fresh"
    return load_config(
        resolve_model_path(config.path, gguf_file=config.gguf_file),
        gguf_file=config.gguf_file,
        rope_is_fixed=config.rope_positions is not None,
        trust_remote_code=config.trust_remote_code,
    )


def _layer_kinds(
    found: PreTrainedConfig, config: ModelConfig, device_type: str, longest_sequence: int
) -> tuple[LayerKind, ...]:
    shape = model_shape(found)
    asked: dict[Feature, bool] = {
        "softcap": bool(setting(found, "attn_logit_softcapping")),
        "sinks": found.model_type in _SINK_TYPES,
    }
    always: frozenset[Feature] = frozenset(feature for feature, is_asked in asked.items() if is_asked)
    windowed: frozenset[Feature] = frozenset((*always, "sliding window"))
    head_dim = setting(found, "qk_head_dim") or shape.head_dim
    windows = layer_windows(found) or (None,) * shape.num_layers
    acting = Counter(None if window is None or window >= longest_sequence else window for window in windows)
    return tuple(
        LayerKind(
            window=window,
            num_layers=num_layers,
            request=AttentionRequest(
                device_type=device_type,
                dtype=DTYPES[config.dtype],
                head_dim=head_dim,
                v_head_dim=setting(found, "v_head_dim") or head_dim,
                features=always if window is None else windowed,
            ),
        )
        for window, num_layers in acting.items()
    )
