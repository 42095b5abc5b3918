"""The policy as a Hugging Face folder."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.models import has_adapters, save_policy_adapters

FOLDER_BYTES = 32 * 1024 * 1024
"""Room for config and tokenizer files."""


def model_file_bytes(model: nn.Module) -> int:
    """About how many bytes `save_model` writes. Tied weights count once; of a model with adapters, those alone."""
    if has_adapters(model):
        tensors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    else:
        tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(storages.values()) + FOLDER_BYTES


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes weights (safetensors, in the model's dtype), configuration and tokenizer.

    `AutoModelForCausalLM.from_pretrained(folder)` reads the same weights, bit by bit, with any attention
    implementation: the one in use here is not recorded. Of a model with adapters only those are written, beside the
    tokenizer and what the base model was: `PeftModel.from_pretrained(base, folder)` reads them.
    """
    if has_adapters(model):
        save_policy_adapters(model, folder)
    else:
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
