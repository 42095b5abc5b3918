"""Log-probs of a reference model that does not learn."""

# Shape letters: M scored tokens of one microbatch.

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.layout.packed_layout import PackedLayout
from ratoon.models import forward_logprobs
from ratoon.types.rollouts import SampledSupport


class ReferenceScore(Protocol):
    """Scores a layout under the reference: [M] without graph, on the model's device.

    It is asked for the very layout and support that the policy is scored with, and has the same temperature. It leaves
    the policy's mode, weights and gradients as they were.
    """

    def __call__(self, layout: PackedLayout, support: SampledSupport | None) -> Tensor: ...


def frozen_reference(model: PreTrainedModel, temperature: float) -> ReferenceScore:
    """A second model, which `attach` has prepared. It is put in evaluation mode and needs no gradients from now on.

    temperature: of the rollout, as for the policy.
    """
    model.eval()
    model.requires_grad_(False)

    @torch.no_grad()
    def score(layout: PackedLayout, support: SampledSupport | None) -> Tensor:
        logprobs_M, _ = forward_logprobs(model, layout, temperature, support=support)
        return logprobs_M

    return score
