"""A policy cut over the ranks of a run, and the whole copy that each of them samples from."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.distributed import full_weights, shard_mesh, shard_model
from ratoon.models.adapters import has_adapters
from ratoon.models.layers import marked_layers
from ratoon.types import UserError


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """In the order in which they run. Raises UserError where the model does not mark them."""
    layers = marked_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not mark its layers, one of which at a time is gathered where a model is cut "
            'over ranks; set trainer.sharding = "none"'
        )
    return layers


def shard_policy(model: PreTrainedModel) -> PreTrainedModel:
    """Cuts an attached model over all ranks, in place, and returns it; it computes in the dtype that it has.

    All ranks hold the same weights. Recomputation and compilation are set before, a sampling copy is made before.
    Raises UserError for a model with adapters: whoever samples needs its base whole, and can share the trainer's.
    """
    if has_adapters(model):
        raise UserError(
            'trainer.sharding = "full" cuts the weights that train, and with model.lora those are small while every '
            'rank samples from the whole base; set trainer.sharding to "none" or "auto"'
        )
    dtype = model.dtype
    shard_model(model, shard_mesh(model.device.type), layers=decoder_layers(model), compute_dtype=dtype)
    return model


def sampling_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A whole copy with weights of its own that need no gradients, made before the model is cut."""
    copied = deepcopy(model)
    copied.requires_grad_(False)
    return copied.eval()


@torch.no_grad()
def refresh_copy(copied: PreTrainedModel, model: PreTrainedModel) -> None:
    """Gives a sampling copy the weights that its cut model has now, rounded to its dtype. All ranks call it together.

    In place: engines that share the copy's tensors need not be told. One weight at a time is held twice.
    """
    targets: Mapping[str, Tensor] = dict(copied.named_parameters())
    for name, value in full_weights(model, copied.dtype):
        targets[name].copy_(value)
