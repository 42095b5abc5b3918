"""What cannot share prompts is refused by name, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.parity.families import build_model
from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.models import attach
from ratoon.models.refusals import refuse_config
from ratoon.types import UserError

TINY: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def config(name: str, **settings: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**settings)


CONFIGS = [
    (config("T5Config"), "'t5' .* encoder-decoder"),
    (config("BartConfig"), "'bart' .* encoder-decoder"),
    (config("GPT2Config", add_cross_attention=True), "'gpt2' .* cross-attention"),
    (config("BertConfig"), "'bert' .* bidirectional"),
    (config("Gemma3TextConfig", use_bidirectional_attention=True), "'gemma3_text' .* bidirectional"),
    (config("Gemma3Config"), r"'gemma3' .* multimodal \(vision_config\)"),
    (config("Qwen2VLConfig"), r"'qwen2_vl' .* multimodal \(vision_config\)"),
    (config("Qwen2AudioConfig"), r"'qwen2_audio' .* multimodal \(audio_config\)"),
    (config("MambaConfig"), "'mamba' .* recurrence"),
    (config("Mamba2Config"), "'mamba2' .* recurrence"),
    (config("RwkvConfig"), "'rwkv' .* recurrence"),
    (config("JambaConfig"), "'jamba' .* recurrence"),
    (config("RecurrentGemmaConfig"), "'recurrent_gemma' .* recurrence"),
    (config("Qwen3NextConfig"), r"'qwen3_next' .* \(linear_attention\) mix tokens by recurrence"),
    (config("Llama4TextConfig"), "'llama4_text' .* layer types chunked_attention are not"),
    (config("BloomConfig"), r"'bloom' .*ALiBi"),
    (config("MptConfig"), r"'mpt' .*ALiBi"),
    (config("FalconConfig", alibi=True), r"'falcon' .*ALiBi"),
    (config("LlamaConfig", attention_dropout=0.1), r"attention dropout is on \(attention_dropout=0.1\).* set .* to 0"),
    (
        config("LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        r"rotary scaling dynamic .* longest sequence .* model.rope_positions",
    ),
]


@pytest.mark.parametrize(("refused", "reason"), CONFIGS, ids=lambda value: getattr(value, "model_type", ""))
def test_configurations_refused_by_name(refused: PreTrainedConfig, reason: str):
    with pytest.raises(UserError, match=reason):
        refuse_config(refused)


MODELS: list[tuple[Callable[[], PreTrainedModel], str]] = [
    (
        lambda: transformers.FalconForCausalLM(transformers.FalconConfig(**TINY, alibi=False)),
        "FalconForCausalLM .* AttentionInterface",
    ),
    (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**TINY)),
        "LlamaModel .* no language-model head .* AutoModelForCausalLM",
    ),
    (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, attn_pdrop=0.0, embd_pdrop=0.0)
        ),
        r"GPT2LMHeadModel .* dropout 'transformer\.h\.0\..*' is on \(p=0.1\)",
    ),
    (
        lambda: transformers.BertLMHeadModel(
            transformers.BertConfig(**TINY, is_decoder=True, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
        ),
        "BertLMHeadModel .* dropout .* is on",
    ),
    (
        lambda: transformers.OPTForCausalLM(
            transformers.OPTConfig(**TINY, ffn_dim=16, word_embed_proj_dim=16, dropout=0.0)
        ),
        "OPTForCausalLM cannot be trained on shared prompts: attention_mask of shape",
    ),
]


@pytest.mark.parametrize(("build", "reason"), MODELS)
def test_models_refused_by_name(build: Callable[[], PreTrainedModel], reason: str):
    with pytest.raises(UserError, match=reason):
        attach(build())


def test_bidirectional_attention_of_a_module_is_found():
    model: Any = build_model("llama")
    model.base_model.layers[1].self_attn.is_causal = False
    with pytest.raises(UserError, match=r"LlamaForCausalLM .* 'model.layers.1.self_attn' is bidirectional"):
        attach(model)


def test_a_model_without_weights():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with pytest.raises(UserError, match="no weights yet"):
        attach(model)
