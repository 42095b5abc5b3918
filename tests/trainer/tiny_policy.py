"""A model and a tokenizer of a few kilobytes."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers import PreTrainedModel as Model

WORDS = ["<pad>", "<eos>", *"abcdefghij"]


def tiny_model(*, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """Two layers of Qwen3's architecture."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
