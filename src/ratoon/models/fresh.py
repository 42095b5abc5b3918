"""A small model and its tokenizer, made on the spot."""

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ratoon.models.config import FreshModelConfig

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"


def build_fresh(config: FreshModelConfig, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen3 with random float32 weights on the CPU, and a tokenizer with one token a character.

    The weights follow `seed` alone, and the global random state stays as it was. The model is not attached yet.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(fresh_config(config))
    return model.eval(), fresh_tokenizer(config)


def fresh_config(config: FreshModelConfig) -> Qwen3Config:
    """The architecture of `build_fresh`."""
    vocabulary = _vocabulary(config)
    return Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tied_embeddings,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS_TOKEN),
        pad_token_id=vocabulary.index(PAD_TOKEN),
        dtype="float32",
    )


def _vocabulary(config: FreshModelConfig) -> list[str]:
    return [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *config.alphabet]


def fresh_tokenizer(config: FreshModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `build_fresh`, without its weights."""
    vocabulary = _vocabulary(config)
    # BPE without merges takes a text apart into its characters, each unknown one for itself.
    backend = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[], unk_token=UNK_TOKEN)
    )
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
