"""A planned part of the step as vectors over its scored tokens."""

# Shape letters: T rows, M scored tokens, N responses.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.algorithms.aggregation import constant_weights, sequence_mean_weights, token_mean_weights
from ratoon.algorithms.config import LossMean
from ratoon.layout.packed_layout import PackedLayout
from ratoon.layout.packing import pack_groups
from ratoon.planner.plan import PartAssignment, StepPlan
from ratoon.types.rollouts import Prompt, Response, RolloutGroup, SampledSupport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """The groups that one optimizer update learns from, and how they are cut."""

    groups: tuple[RolloutGroup, ...]
    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """One forward pass: its rows, and what the loss needs at each scored token."""

    layout: PackedLayout

    loss_weights_M: Tensor
    """[M] float64 on the CPU. Each token's share of the step's mean."""

    advantages_M: Tensor | None = None
    """[M] float64 on the CPU. None in the supervised stage."""

    rollout_logprobs_M: Tensor | None = None
    """[M] float32 on the CPU. None where the engine gave none."""

    support: SampledSupport | None = None
    """Of M tokens. None: every token was drawn among the whole vocabulary."""

    old_logprobs_M: Tensor | None = None
    """[M] on the model's device. None: the policy itself is the old one (a first and only update)."""

    ref_logprobs_M: Tensor | None = None
    """[M] on the model's device. None where no KL penalty stands in the loss."""

    @property
    def prompt_layout(self) -> PackedLayout:
        """The first group's prompt alone, nothing scored."""
        token_ids = self.layout.token_ids_T[: self.layout.segment_offsets[1]]
        return pack_groups([RolloutGroup(Prompt("prompt", token_ids), ())])


def build_microbatch(
    update: Update,
    parts: Sequence[PartAssignment],
    *,
    loss_mean: LossMean,
    max_response_tokens: int | None = None,
) -> Microbatch:
    """The layout and vectors of `parts` = ((group index, response indices), ...).

    max_response_tokens: the run's limit, which the "constant" mean divides by; the others do not need it.
    """
    groups = [update.groups[index].select(responses) for index, responses in parts]
    layout = pack_groups(groups)
    responses = [response for group in groups for response in group.responses]

    advantages_M = None
    if all(group.advantages_N is not None for group in groups):
        advantages_N = np.concatenate(
            [np.empty(0), *(group.advantages_N for group in groups if group.advantages_N is not None)]
        )
        advantages_M = torch.from_numpy(advantages_N[layout.sequence_of_M])
    rollout_logprobs_M = None
    if all(response.rollout_logprobs is not None or response.num_tokens == 0 for response in responses):
        known = [response.rollout_logprobs for response in responses if response.rollout_logprobs is not None]
        rollout_logprobs_M = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *known]))

    supports = [response.support for response in responses if response.num_tokens]
    kept = [support for support in supports if support is not None]
    assert len(kept) in (0, len(supports)), "responses of one step were drawn from distributions of two kinds"
    return Microbatch(
        layout=layout,
        loss_weights_M=_loss_weights(layout, responses, update.plan, loss_mean, max_response_tokens),
        advantages_M=advantages_M,
        rollout_logprobs_M=rollout_logprobs_M,
        support=SampledSupport.concatenate(kept) if kept else None,
    )


def _loss_weights(
    layout: PackedLayout,
    responses: Sequence[Response],
    plan: StepPlan,
    loss_mean: LossMean,
    max_response_tokens: int | None,
) -> Tensor:
    """[M] float64. Every scored token is trained on."""
    loss_mask_M = torch.ones(layout.num_scored, dtype=torch.bool)
    match loss_mean:
        case "token":
            return token_mean_weights(loss_mask_M, num_loss_tokens=plan.num_loss_tokens, dtype=torch.float64)
        case "sequence":
            lengths_N = torch.tensor([response.num_tokens for response in responses], dtype=torch.int64)
            sequence_of_M = torch.from_numpy(layout.sequence_of_M.copy())
            return sequence_mean_weights(
                loss_mask_M, sequence_of_M, lengths_N, num_sequences=plan.num_sequences, dtype=torch.float64
            )
        case "constant":
            assert max_response_tokens is not None, "the constant mean divides by rollout.max_response_tokens"
            return constant_weights(
                loss_mask_M,
                max_response_tokens=max_response_tokens,
                num_sequences=plan.num_sequences,
                dtype=torch.float64,
            )
