"""Rotary scalings that would depend on the batch, fixed for a run."""

from collections.abc import Iterator

import torch
import torch.nn as nn
from transformers import PreTrainedModel

BATCH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})
"""Scalings that choose frequencies by the longest sequence of each forward pass."""

FIXED_ROPE = "fixed"


def batch_dependent_rotaries(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Rotary modules whose frequencies still follow the batch, with their scalings."""
    for module in model.modules():
        rope_type = vars(module).get("rope_type")
        kinds = tuple(rope_type.values()) if isinstance(rope_type, dict) else (rope_type,)
        chosen = tuple(kind for kind in kinds if kind in BATCH_DEPENDENT_ROPES)
        if chosen:
            yield module, chosen


def has_fixed_rope(model: nn.Module) -> bool:
    """Whether `fix_rope` has fixed every scaling that followed the batch."""
    is_fixed = any(
        FIXED_ROPE in (rope_type.values() if isinstance(rope_type, dict) else (rope_type,))
        for rope_type in (vars(module).get("rope_type") for module in model.modules())
    )
    return is_fixed and not any(batch_dependent_rotaries(model))


def fix_rope(model: PreTrainedModel, num_positions: int) -> PreTrainedModel:
    """Gives dynamic and longrope scalings, in place, the frequencies of a sequence of `num_positions` tokens.

    From then on a token's log-prob does not depend on the other sequences of its batch. Longer sequences keep
    the same frequencies. The model's configuration is unchanged: another engine that serves the weights
    must fix its scaling for the same length. Does nothing to other models.
    """
    if num_positions < 1:
        raise ValueError(f"num_positions must be at least 1, got {num_positions}")
    for rotary, _ in list(batch_dependent_rotaries(model)):
        _fix(rotary, num_positions)
    return model


@torch.no_grad()
def _fix(rotary: nn.Module, num_positions: int) -> None:
    rope_type = vars(rotary)["rope_type"]
    last_position = torch.tensor([[num_positions - 1]], device=next(rotary.buffers()).device)
    activations = torch.empty(0, device=last_position.device)  # tells the module dtype and device only
    if not isinstance(rope_type, dict):
        rotary(activations, last_position)
        vars(rotary)["rope_type"] = FIXED_ROPE
        return
    for layer_type, kind in list(rope_type.items()):
        if kind in BATCH_DEPENDENT_ROPES:
            rotary(activations, last_position, layer_type=layer_type)
            rope_type[layer_type] = FIXED_ROPE
