"""What cannot run on a forest of segments, named with the reason, before any weight is read."""

from collections.abc import Iterable

import torch.nn as nn
from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.models.rope import BATCH_DEPENDENT_ROPES, batch_dependent_rotaries
from ratoon.models.settings import setting
from ratoon.types import UserError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Token mixing that a forest expresses. Chunked, sparse, linear and convolutional layers are not among it."""

RECURRENT_MODEL_TYPES = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)

ENCODER_MODEL_TYPES = frozenset(
    {
        "albert",
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "megatron-bert",
        "modernbert",
        "mpnet",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Bidirectional, unless their configuration says is_decoder."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def refuse_config(config: PreTrainedConfig, *, rope_is_fixed: bool = False) -> None:
    """Raises UserError, naming model type and reason, if no model of this configuration can run a forest."""
    reason = _encoder_reason(config) or _recurrent_reason(config) or _position_reason(config)
    if reason is None and not rope_is_fixed:
        reason = _rope_reason(_rope_types(config))
    if reason is None:
        reason = _dropout_reason(config)
    if reason is not None:
        raise UserError(f"{config.model_type!r} cannot be trained on shared prompts: {reason}")


def refuse_model(model: PreTrainedModel, *, rope_is_fixed: bool = False) -> None:
    """Raises UserError, naming class and reason, if this model cannot run a forest. Its weights are not read."""
    reason = _module_reason(model)
    if reason is None and not rope_is_fixed:
        reason = _rope_reason(kind for _, kinds in batch_dependent_rotaries(model) for kind in kinds)
    if reason is not None:
        raise UserError(f"{type(model).__name__} cannot be trained on shared prompts: {reason}")


def _encoder_reason(config: PreTrainedConfig) -> str | None:
    if setting(config, "is_encoder_decoder"):
        return "it is an encoder-decoder, whose decoder also attends to an encoded input; use a decoder-only model"
    if setting(config, "add_cross_attention"):
        return "it has cross-attention (add_cross_attention), and a forest holds self-attention only"
    modalities = sorted(
        key for key in config.sub_configs if any(word in key for word in ("vision", "audio", "speech", "video"))
    )
    if modalities:
        return (
            f"it is multimodal ({', '.join(modalities)}), and only text is supported; "
            "use the text-only model of the family"
        )
    if setting(config, "use_bidirectional_attention"):
        return "its attention is bidirectional (use_bidirectional_attention); a forest's rows read only earlier rows"
    if config.model_type in ENCODER_MODEL_TYPES and not setting(config, "is_decoder"):
        return (
            "it is an encoder, whose attention is bidirectional, as in BERT; a forest's rows read only earlier rows. "
            "Use a decoder-only model"
        )
    return None


def _recurrent_reason(config: PreTrainedConfig) -> str | None:
    kinds = set(setting(config, "layer_types", "layers_block_type", "block_types") or ())
    unknown = sorted(str(kind) for kind in kinds - LAYER_TYPES)
    if config.model_type in RECURRENT_MODEL_TYPES or config.model_type.startswith("qwen3_5"):
        layers = f" ({', '.join(unknown)})" if unknown else ""
        return (
            f"its layers{layers} mix tokens by recurrence or convolution, whose state at the prompt's end "
            "would have to be forked for each response, and that is not built yet"
        )
    if unknown:
        return (
            f"its layer types {', '.join(unknown)} are not causal self-attention, global or with a sliding window; "
            "only full_attention and sliding_attention layers can share a prompt"
        )
    return None


def _position_reason(config: PreTrainedConfig) -> str | None:
    uses_alibi = config.model_type == "bloom" or bool(setting(config, "alibi"))
    if config.model_type == "mpt":
        uses_alibi = bool(setting(config.attn_config, "alibi"))
    if uses_alibi:
        return "its position bias (ALiBi) is added to the scores outside transformers' attention interface"
    if setting(config, "relative_attention_num_buckets", "relative_attention"):
        return "its relative position bias is added to the scores outside transformers' attention interface"
    return None


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The rotary scalings of all layers."""
    parameters = setting(config, "rope_parameters") or {}
    # Hybrids hold one set of parameters for each layer type.
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {group["rope_type"] for group in groups if "rope_type" in group}


def _rope_reason(rope_types: Iterable[str]) -> str | None:
    chosen_by_length = sorted(BATCH_DEPENDENT_ROPES & set(rope_types))
    if not chosen_by_length:
        return None
    return (
        f"its rotary scaling {', '.join(chosen_by_length)} takes its frequencies from the longest sequence at hand, "
        "so a token's log-prob would depend on what it travels with; fix it for the run with "
        "model.rope_positions = <longest sequence> (ratoon.models.fix_rope), and serve with the same setting"
    )


def _dropout_reason(config: PreTrainedConfig) -> str | None:
    for name in ATTENTION_DROPOUTS:
        rate = setting(config, name)
        if rate:
            return (
                f"its attention dropout is on ({name}={rate}), and log-probs must not be random; "
                f"set {name} to 0 in its config.json"
            )
    return None


def _module_reason(model: PreTrainedModel) -> str | None:
    if model.get_output_embeddings() is None or model.base_model is model:
        return "it has no language-model head over a decoder; load it with AutoModelForCausalLM"
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        return f"its output head is a {type(model.get_output_embeddings()).__name__}, not a linear layer"
    if not model._can_set_attn_implementation():
        return (
            "its attention does not go through transformers' AttentionInterface, so it would ignore the forest "
            "and let responses read one another"
        )
    for name, module in model.named_modules():
        if vars(module).get("is_causal") is False:
            return f"its attention {name!r} is bidirectional (is_causal is False); rows may read only earlier rows"
        if isinstance(module, nn.Dropout) and module.p > 0:
            return (
                f"its dropout {name!r} is on (p={module.p}), and log-probs must not be random; "
                "set the dropout rates in its config.json to 0"
            )
    return None
