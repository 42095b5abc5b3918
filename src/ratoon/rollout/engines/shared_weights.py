"""A second module tree over the trainer's own parameters, so that generating never touches the trainer's modules."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from ratoon.models import are_adapters_off
from ratoon.rollout.errors import RolloutError


def twin_of(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A module tree with a config of its own, the same Parameter and buffer objects, and `attention` as implementation.

    It is in eval mode for good (no dropout, no gradient checkpointing), while `model` keeps its mode, its attention
    implementation and its gradients. Replaced modules and adapters of `model` are carried over:
    the twin's stay on while `adapters_off` switches `model`'s off.
    """
    if are_adapters_off(model):
        raise RolloutError(
            "the model's adapters are off, and the engine would sample from the base; leave adapters_off"
        )
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Gradients hang on the shared parameters, which the memo keeps whole.
    twin = copy.deepcopy(model, memo)
    twin.eval()
    twin.set_attn_implementation(attention)
    if twin.config.get_text_config()._attn_implementation != attention:
        raise RolloutError(
            f"{type(model).__name__} did not take the attention implementation {attention!r}; its attention does not "
            "go through transformers' AttentionInterface, which in-process generation needs"
        )
    return twin


def share_again(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Point `twin` at the Parameter and buffer objects `model` holds now, where any of them was replaced."""
    originals = dict(model.named_modules(remove_duplicate=False))
    copies = dict(twin.named_modules(remove_duplicate=False))
    if originals.keys() != copies.keys():
        changed = sorted(originals.keys() ^ copies.keys())
        raise RolloutError(
            f"the model's modules changed after the rollout engine was built ({', '.join(changed[:3])}); "
            "build the engine after the last change to the model"
        )
    for name, original in originals.items():
        _share(original, copies[name])


def _share(original: nn.Module, duplicate: nn.Module) -> None:
    for name, parameter in original._parameters.items():
        duplicate._parameters[name] = parameter
    for name, buffer in original._buffers.items():
        duplicate._buffers[name] = buffer


def check_device(device: torch.device | str | None, model: PreTrainedModel) -> None:
    """Raise ValueError where `device` is given and is not the one the model is on."""
    where = model.device
    wanted = where if device is None else torch.device(device)
    if wanted.type != where.type or (wanted.index is not None and wanted.index != (where.index or 0)):
        raise ValueError(
            f"the rollout engine shares the model's weights, which are on {where}, but got device={wanted}"
        )
