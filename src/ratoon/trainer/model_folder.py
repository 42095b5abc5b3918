"""The policy as a Hugging Face folder."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FOLDER_BYTES = 32 * 1024 * 1024
"""Room for config and tokenizer files."""


def model_file_bytes(model: nn.Module) -> int:
    """About how many bytes `save_model` writes. Tied weights count once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values()) + _FOLDER_BYTES


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes weights (safetensors, in the model's dtype), configuration and tokenizer.

    `AutoModelForCausalLM.from_pretrained(folder)` reads the same weights, bit by bit, with any attention
    implementation: the one in use here is not recorded.
    """
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
