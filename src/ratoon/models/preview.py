"""What a recipe's model will be, and what is wrong with it, from its files' headers: no weight is read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from ratoon.models.adapters import check_peft, num_adapter_parameters
from ratoon.models.config import ModelConfig
from ratoon.models.fresh import fresh_config
from ratoon.models.invariant import check_can_be_invariant
from ratoon.models.load import load_config
from ratoon.models.model_files import refusing, resolve_model_path
from ratoon.models.quantised import check_four_bit, quantisable
from ratoon.models.refusals import refuse_model
from ratoon.models.shape import model_shape
from ratoon.types import ModelShape, Prompt, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreview:
    """A model's sizes."""

    shape: ModelShape

    num_parameters: int | None
    """Tied weights count once; adapters not at all. None where the folder's own code would have to tell."""

    num_trained: int | None
    """All of them, or the adapters'."""

    num_quantised: int = 0
    """Weights that are held in 4 bits."""


def preview_model(config: ModelConfig) -> ModelPreview:
    """Reads the model's configuration and makes it without weights.

    Raises UserError for a folder that cannot be read, a model that cannot run packed layouts, and adapters that it
    cannot have. What only its own forward pass can show, `attach` finds out later.
    """
    if config.lora is not None:
        check_peft()
    if config.quantization is not None:
        check_four_bit()
    model_config, is_known = _configuration(config)
    shape = model_shape(model_config)
    if config.batch_invariant:
        check_can_be_invariant(shape.num_experts)
    if not is_known:  # code from the folder need not run without memory
        return ModelPreview(shape=shape, num_parameters=None, num_trained=None)
    model = _without_weights(config, model_config)
    refuse_model(model, rope_is_fixed=config.rope_positions is not None)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    rounded = [] if config.quantization is None else [linear.weight.numel() for _, linear in quantisable(model)]
    return ModelPreview(
        shape=shape,
        num_parameters=num_parameters,
        num_trained=num_parameters if config.lora is None else num_adapter_parameters(model, config.lora),
        num_quantised=sum(rounded),
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raises UserError where the tokenizer gives ids that the model has no weights for.

    vocab_size: rows of the model's embedding, which may be padded beyond the tokenizer. Special tokens beyond it are
    let pass (Gemma 3 has one, for images, that its text models lack): `check_token_ids` finds the prompts with one.
    """
    added = tokenizer.added_tokens_decoder
    outside = {
        token: index
        for token, index in tokenizer.get_vocab().items()
        if index >= vocab_size and not (index in added and added[index].special and token != tokenizer.eos_token)
    }
    if outside:
        largest = max(outside, key=lambda token: outside[token])
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} tokens, and the model's vocabulary {vocab_size:,}: {len(outside):,} "
            f"tokens have no weights, for example {largest!r} with id {outside[largest]}; is the tokenizer of the "
            "same model?"
        )


def check_token_ids(prompts: Iterable[Prompt], vocab_size: int) -> None:
    """Raises UserError naming the first prompt with a token that the model has no weights for."""
    for prompt in prompts:
        largest = int(prompt.token_ids.max(initial=0))
        if largest >= vocab_size:
            raise UserError(
                f"{prompt.id}: token id {largest} is outside the model's vocabulary of {vocab_size:,}, as a special "
                "token that only larger models of the family know; take it out of the prompt"
            )


def _configuration(config: ModelConfig) -> tuple[PreTrainedConfig, bool]:
    """The model's configuration, and whether transformers has its code."""
    if config.fresh is not None:
        return fresh_config(config.fresh), True
    assert config.path is not None, "a model config has a path or is fresh"
    folder = resolve_model_path(config.path, gguf_file=config.gguf_file)
    found = load_config(
        folder,
        gguf_file=config.gguf_file,
        rope_is_fixed=config.rope_positions is not None,
        trust_remote_code=config.trust_remote_code,
    )
    return found, not (config.trust_remote_code and hasattr(found, "auto_map"))


def _without_weights(config: ModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    where = Path("model.fresh" if config.path is None else config.path)
    with refusing(where, "configuration"), torch.device("meta"), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config)
        model.tie_weights()  # left out with the initial weights
        return model
