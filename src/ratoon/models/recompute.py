"""What the backward pass computes again instead of keeping."""

from functools import cache, partial
from typing import Any, get_args

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ratoon.models.config import Recompute
from ratoon.models.interface import attachment_of
from ratoon.models.layers import marked_layers
from ratoon.types import UserError


class Recomputed(nn.Module):
    """Mixed into a module's class, keeps the module's inputs only, whenever gradients are wanted.

    A class instead of a wrapper or a replaced `forward`: parameter names stay, and a deep copy computes
    with its own weights.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=False)


def set_recompute(model: PreTrainedModel, mode: Recompute) -> PreTrainedModel:
    """Sets, in place, what the backward pass of an attached model computes again.

    - `none`: nothing; every activation is kept.
    - `selective`: norms and MLPs (experts and their router too). They hold most activations of a layer and
      cost least to repeat; projections and attention, whose cost grows with length, run once.
    - `full`: every layer, attention included; one hidden state of each layer is kept.

    Set it before the model is sharded. Results do not change.
    """
    if mode not in get_args(Recompute):
        raise ValueError(f"recompute must be one of {', '.join(get_args(Recompute))}, got {mode!r}")
    attention_classes = frozenset(call.module_class for call in attachment_of(model).calls)
    for module in model.modules():
        if isinstance(module, Recomputed):
            _restore(module)
    if mode == "none":
        return model
    layers = marked_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} does not mark its layers for recomputation; use recompute = 'none' with it"
        )
    for layer in layers:
        chosen = [layer] if mode == "full" else _norms_and_mlps(layer, attention_classes)
        for module in chosen:
            _change_class(module, _recomputed_class(type(module)))
    return model


def _norms_and_mlps(layer: nn.Module, attention_classes: frozenset[type[nn.Module]]) -> list[nn.Module]:
    """The children of a layer that are not its attention, and the norms inside the attention."""
    chosen: list[nn.Module] = []
    for child in layer.children():
        has_attention = any(type(module) in attention_classes for module in child.modules())
        if has_attention:
            chosen += [module for module in child.modules() if "Norm" in type(module).__name__]
        elif next(child.parameters(), None) is not None:
            chosen.append(child)
    return chosen


@cache
def _recomputed_class(plain: type[nn.Module]) -> type[nn.Module]:
    # The name stays: sharding and hooks find layers by it.
    return type(plain.__name__, (Recomputed, plain), {"__module__": plain.__module__})


def _restore(module: nn.Module) -> None:
    plain = type(module).__mro__[2]
    if _recomputed_class(plain) is not type(module):
        raise ValueError(
            f"{type(module).__name__} was sharded or wrapped after set_recompute; set recompute before that"
        )
    _change_class(module, plain)


def _change_class(module: nn.Module, to: type[nn.Module]) -> None:
    module.__class__ = to
