"""The reference of a LoRA run: the policy's own base, beneath its adapters, or beneath those of its warm start."""

# Shape letters: M scored tokens of one microbatch.

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.layout.packed_layout import PackedLayout
from ratoon.models import adapters_as, adapters_off, forward_logprobs, has_adapters, read_adapters
from ratoon.trainer.reference import ReferenceScore
from ratoon.types.rollouts import SampledSupport


def adapters_off_reference(model: PreTrainedModel, temperature: float) -> ReferenceScore:
    """The policy `model` with its adapters off: no second model is held.

    temperature: of the rollout, as for the policy. Raises ValueError for a model without adapters.
    """
    if not has_adapters(model):
        raise ValueError(f"this {type(model).__name__} has no adapters; its reference is a frozen_reference")

    @torch.no_grad()
    def score(layout: PackedLayout, support: SampledSupport | None) -> Tensor:
        with adapters_off(model):
            logprobs_M, _ = forward_logprobs(model, layout, temperature, support=support)
        return logprobs_M

    return score


def saved_adapters_reference(model: PreTrainedModel, folder: Path, temperature: float) -> ReferenceScore:
    """The policy `model` with the adapters that `save_model` wrote to `folder`; no second model is held.

    temperature: of the rollout, as for the policy. Raises UserError where the adapters do not fit the model.
    """
    saved = read_adapters(model, folder)

    @torch.no_grad()
    def score(layout: PackedLayout, support: SampledSupport | None) -> Tensor:
        with adapters_as(model, saved):
            logprobs_M, _ = forward_logprobs(model, layout, temperature, support=support)
        return logprobs_M

    return score
