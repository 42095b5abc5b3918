"""Degenerate cases are counted, and said where they rule the step."""

import numpy as np
import pytest

from ratoon.loop.diagnosis import StepDiagnosis
from ratoon.types import Prompt, Response, RolloutGroup
from ratoon.types.rollouts import FinishReason


def response(num_tokens: int, reason: FinishReason = FinishReason.EOS, version: int | None = 0) -> Response:
    versions = None if version is None else np.full(num_tokens, version)
    return Response(np.arange(num_tokens), finish_reason=reason, policy_versions=versions)


def group(*responses: Response, rewards: list[float] | None = None) -> RolloutGroup:
    return RolloutGroup(
        Prompt("p", np.array([1, 2])), responses, rewards_N=None if rewards is None else np.array(rewards)
    )


def test_counts():
    """An oracle by hand: 2 groups, 5 responses."""
    groups = [
        group(response(1), response(0, FinishReason.ABORT), response(4, version=2), rewards=[0.5, 0.5, 0.5]),
        group(response(3, FinishReason.LENGTH, 3), response(1, FinishReason.LENGTH, 4), rewards=[0.0, 1.0]),
    ]
    found = StepDiagnosis.of(groups, policy_version=4)
    assert (found.num_groups, found.num_responses) == (2, 5)
    assert found.num_equal_reward_groups == 1
    assert found.num_truncated == 2
    assert found.num_empty == 2
    assert found.reward_mean == pytest.approx(0.5)
    assert found.reward_std == pytest.approx(np.std([0.5, 0.5, 0.5, 0.0, 1.0]))
    assert found.response_tokens_mean == pytest.approx(9 / 5)
    assert found.staleness_max == 4
    assert found.warnings() == {}


@pytest.mark.parametrize("groups", [[], [group(response(2))], [group(response(0, version=None), rewards=[1.0])]])
def test_nothing_to_count_is_no_error(groups: list[RolloutGroup]):
    found = StepDiagnosis.of(groups, policy_version=3)
    assert found.num_groups == len(groups)
    assert np.isfinite([found.reward_mean, found.reward_std, found.response_tokens_mean]).all()


def test_group_of_one_is_a_group_of_equal_rewards():
    assert StepDiagnosis.of([group(response(2), rewards=[0.3])], policy_version=0).num_equal_reward_groups == 1


def test_equal_rewards_explain_the_zero_loss():
    """trl#3452. Equal within each group, different between them: still nothing to learn."""
    groups = [group(response(2), response(3), rewards=[r, r]) for r in (0.0, 1.0)]
    (warning,) = StepDiagnosis.of(groups, policy_version=0).warnings().values()
    assert "so the policy loss is 0" in warning
    assert "rollout.group_size" in warning


@pytest.mark.parametrize(("num_cut", "is_said"), [(8, False), (9, True), (10, True)])
def test_truncation_is_said_from_nine_tenths_on(num_cut: int, is_said: bool):
    """trl#5697."""
    responses = [response(3, FinishReason.LENGTH if i < num_cut else FinishReason.EOS) for i in range(10)]
    warnings = StepDiagnosis.of([group(*responses, rewards=[float(i) for i in range(10)])], policy_version=0).warnings()
    assert (
        any(f"{num_cut} of 10 responses were cut by rollout.max_response_tokens" in w for w in warnings.values())
        == is_said
    )


def test_empty_responses_are_said():
    found = StepDiagnosis.of([group(response(1), response(1), rewards=[0.0, 1.0])], policy_version=0)
    (warning,) = found.warnings().values()
    assert "2 of 2 responses were empty" in warning
