"""What is degenerate in a step's responses, counted, and said in words when it matters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratoon.types.rollouts import FinishReason, RolloutGroup

_MOSTLY = 0.9
"""Share of a step from which a degenerate case is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """Counts over one step's groups and responses."""

    num_groups: int
    num_responses: int
    num_equal_reward_groups: int
    """Groups whose rewards are all equal: their advantages are 0 and teach nothing."""

    num_truncated: int
    """Responses that the token budget ended."""

    num_empty: int
    """Responses without text: nothing but EOS, or no token at all."""

    reward_mean: float
    reward_std: float
    response_tokens_mean: float
    staleness_max: int
    """Policy versions between the oldest token and the weights it trains."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], policy_version: int) -> "StepDiagnosis":
        responses = [response for group in groups for response in group.responses]
        rewards = np.concatenate([group.rewards_N for group in groups if group.rewards_N is not None] or [np.zeros(0)])
        oldest = [
            int(response.policy_versions.min())
            for response in responses
            if response.policy_versions is not None and response.num_tokens
        ]
        return cls(
            num_groups=len(groups),
            num_responses=len(responses),
            num_equal_reward_groups=sum(
                group.rewards_N is not None and np.ptp(group.rewards_N) == 0 for group in groups if group.group_size
            ),
            num_truncated=sum(response.is_truncated for response in responses),
            num_empty=sum(
                response.num_tokens == 0 or (response.num_tokens == 1 and response.finish_reason is FinishReason.EOS)
                for response in responses
            ),
            reward_mean=float(rewards.mean()) if rewards.size else 0.0,
            reward_std=float(rewards.std()) if rewards.size else 0.0,
            response_tokens_mean=float(np.mean([response.num_tokens for response in responses])) if responses else 0.0,
            staleness_max=policy_version - min(oldest, default=policy_version),
        )

    def warnings(self) -> dict[str, str]:
        """For each degenerate case that rules the step, by its short name, one sentence."""
        found: dict[str, str] = {}
        if self.num_groups and self.num_equal_reward_groups == self.num_groups:
            found["equal rewards"] = (
                f"every group's rewards were equal (mean {self.reward_mean:.3g}), so the policy loss is 0 and nothing "
                "was learned; use easier or harder prompts, a larger rollout.group_size, or a finer reward"
            )
        if self.num_responses and self.num_truncated >= _MOSTLY * self.num_responses:
            found["cut responses"] = (
                f"{self.num_truncated} of {self.num_responses} responses were cut by rollout.max_response_tokens "
                "before the model ended them; raise it, or check that the model knows its EOS token (model.eos_token)"
            )
        if self.num_responses and self.num_empty >= _MOSTLY * self.num_responses:
            found["empty responses"] = (
                f"{self.num_empty} of {self.num_responses} responses were empty; check the chat template and the prompt"
            )
        return found
