"""Degenerate cases are counted, and said where they rule the step; a loss of 0 has a named cause."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratoon.loop.diagnosis import StepDiagnosis, StepFacts, ends_in_cycle, explain_loss
from ratoon.types import Prompt, Response, RolloutGroup
from ratoon.types.rollouts import FinishReason

TRAINED = {
    "num_updates": 1,
    "num_loss_tokens": 9,
    "loss": 1e-9,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "entropy_mean": 0.7,
    "kl_old_mean": 0.0,
}
"""What the trainer adds to a step's row, in a step with nothing wrong."""


def response(num_tokens: int, reason: FinishReason = FinishReason.EOS, version: int | None = 0) -> Response:
    versions = None if version is None else np.full(num_tokens, version)
    return Response(np.arange(num_tokens), finish_reason=reason, policy_versions=versions)


def group(*responses: Response, rewards: list[float] | None = None) -> RolloutGroup:
    return RolloutGroup(
        Prompt("p", np.array([1, 2])), responses, rewards_N=None if rewards is None else np.array(rewards)
    )


def cut(num_tokens: int = 3) -> Response:
    return response(num_tokens, FinishReason.LENGTH)


def cause_of(groups: list[RolloutGroup], **trained: float) -> tuple[str, str] | None:
    """Kind and sentence of why the loss of a step with these groups is 0."""
    found = StepDiagnosis.of(groups, policy_version=0, num_responses_asked=8)
    cause = explain_loss(StepFacts.of({**asdict(found), **TRAINED, **trained}))
    return None if cause is None else (cause.kind, cause.sentence)


def test_counts():
    """An oracle by hand: 2 groups, 5 responses."""
    groups = [
        group(response(1), response(0, FinishReason.ABORT), response(4, version=2), rewards=[0.5, 0.5, 0.5]),
        group(response(3, FinishReason.LENGTH, 3), response(1, FinishReason.LENGTH, 4), rewards=[0.0, 1.0]),
    ]
    found = StepDiagnosis.of(groups, policy_version=4)
    assert (found.num_groups, found.num_responses) == (2, 5)
    assert (found.num_equal_reward_groups, found.num_zero_advantages) == (1, 3)
    assert (found.num_truncated, found.num_repetitive) == (2, 0)
    assert found.num_empty == 2
    assert found.num_lost_responses == 0
    assert found.reward_mean == pytest.approx(0.5)
    assert found.reward_std == pytest.approx(np.std([0.5, 0.5, 0.5, 0.0, 1.0]))
    assert found.response_tokens_mean == pytest.approx(9 / 5)
    assert found.staleness_max == 4
    assert found.warnings() == {}


def test_lengths_count_truncated_responses():
    """TRL#3476: masked or not, a truncated response is as long as it is."""
    found = StepDiagnosis.of([group(cut(9), response(3), rewards=[0.0, 1.0])], policy_version=0)
    assert found.response_tokens_mean == 6


@pytest.mark.parametrize("groups", [[], [group(response(2))], [group(response(0, version=None), rewards=[1.0])]])
def test_nothing_to_count_is_no_error(groups: list[RolloutGroup]):
    found = StepDiagnosis.of(groups, policy_version=3)
    assert found.num_groups == len(groups)
    assert np.isfinite([found.reward_mean, found.reward_std, found.response_tokens_mean]).all()


def test_lost_responses_are_counted_and_empty_groups_are_none():
    groups = [group(rewards=[]), group(response(2), response(3), rewards=[0.0, 1.0])]
    found = StepDiagnosis.of(groups, policy_version=0, num_responses_asked=8)
    assert (found.num_groups, found.num_responses, found.num_lost_responses) == (1, 2, 6)
    assert "6 of 8 responses were lost before training" in found.warnings()["lost responses"]


def test_known_advantages_decide_what_teaches():
    """A baseline over the whole step teaches from groups of equal rewards; rounding teaches nothing."""
    teaches = replace(group(response(2), response(2), rewards=[1.0, 1.0]), advantages_N=np.array([0.5, 0.5]))
    rounding = replace(group(response(2), response(2), rewards=[0.1, 0.1]), advantages_N=np.array([1e-17, -1e-17]))
    found = StepDiagnosis.of([teaches, rounding], policy_version=0)
    assert (found.num_equal_reward_groups, found.num_zero_advantages) == (2, 2)
    assert "equal rewards" not in found.warnings()


# Why the loss is 0


def test_equal_rewards_explain_the_zero_loss():
    """TRL#3452, unsloth#2291, ms-swift#4547. Equal within each group, different between them: nothing to learn."""
    groups = [group(response(2), response(3), rewards=[r, r]) for r in (0.0, 1.0)]
    (warning,) = StepDiagnosis.of(groups, policy_version=0).warnings().values()
    assert "every group's rewards were equal (mean 0.5), so the policy loss is 0" in warning
    assert "rollout.group_size" in warning
    assert cause_of(groups, grad_norm=0.0, loss=0.0) == ("equal rewards", warning)


def test_ratio_one_and_centred_advantages_are_normal():
    """TRL#3857, ms-swift#4570, TRL#3452: the loss is 0 and all is well. Said, and no warning."""
    groups = [group(response(2), response(3), rewards=[0.0, 1.0])]
    found = StepDiagnosis.of(groups, policy_version=0)
    facts = StepFacts.of({**asdict(found), **TRAINED})
    cause = explain_loss(facts)
    assert cause is not None
    assert cause.is_normal
    assert "normal: with one update a step every ratio is 1" in cause.sentence
    assert "norm 0.5" in cause.sentence
    assert found.warnings(facts) == {}


@pytest.mark.parametrize("trained", [{"loss": 0.3}, {"num_updates": 2}])
def test_loss_that_is_not_zero_is_not_explained(trained: dict[str, float]):
    assert cause_of([group(response(2), response(3), rewards=[0.0, 1.0])], **trained) is None


def test_no_response_that_ended():
    """TRL#5697: the quick start there truncates nearly all answers, and nothing learns, silently."""
    cause = cause_of([group(cut(), cut(), rewards=[0.0, 0.0])] * 2, grad_norm=0.0)
    assert cause is not None
    assert cause[0] == "no response ended"
    assert "all 4 were cut by rollout.max_response_tokens" in cause[1]
    assert "EOS token" in cause[1]


def test_truncated_and_masked():
    """TRL#5697, TRL#3476: rewards differ, but no token is left in the loss."""
    cause = cause_of([group(cut(), cut(), rewards=[0.0, 1.0])], num_loss_tokens=0, grad_norm=0.0)
    assert cause is not None
    assert cause[0] == "all masked"
    assert "all 2 responses were cut by rollout.max_response_tokens and are masked" in cause[1]


def test_step_that_was_not_trained_is_useless():
    """Its row holds nothing of the trainer, as all responses were cut and masked, though their rewards differ."""
    found = StepDiagnosis.of([group(cut(), cut(), rewards=[0.0, 1.0])], policy_version=0)
    facts = StepFacts.of(asdict(found))
    assert "all masked" in found.warnings(facts)
    assert "all masked" not in found.warnings()


def test_no_tokens():
    cause = cause_of([group(response(0), cut(), rewards=[0.0, 1.0])], num_loss_tokens=0, grad_norm=0.0)
    assert cause is not None
    assert "of 2 responses 1 were empty and 1 cut" in cause[1]


def test_only_empty_responses():
    cause = cause_of([group(response(1), response(1), rewards=[0.0, 0.0])], grad_norm=0.0)
    assert cause is not None
    assert cause[0] == "only empty responses"
    assert "chat template" in cause[1]


@pytest.mark.parametrize("groups", [[], [group(rewards=[])]])
def test_no_responses(groups: list[RolloutGroup]):
    """TRL#6714: the engine returned none, or every reward failed and was dropped."""
    cause = cause_of(groups, num_loss_tokens=0)
    assert cause is not None
    assert cause[0] == "no responses"
    assert "8 were lost, because the engine gave none, or their reward failed" in cause[1]


def test_groups_of_one():
    """prime-rl docs/algorithms.md:115. The recipe refuses it; lost responses may leave it."""
    cause = cause_of([group(response(2), rewards=[r]) for r in (0.0, 1.0)], grad_norm=0.0)
    assert cause is not None
    assert cause[0] == "groups of one"
    assert "rollout.group_size" in cause[1]


def test_groups_of_one_by_the_recipe():
    """Compared over the step (reinforce++), they teach nothing only where all rewards are equal."""
    groups = [group(response(2), rewards=[1.0]) for _ in range(8)]  # as many as were asked for
    cause = cause_of(groups, grad_norm=0.0)
    assert cause is not None and cause[0] == "equal rewards"


@pytest.mark.parametrize(("reward", "is_solved"), [(1.0, True), (0.99, False), (0.0, False)])
def test_rewards_that_are_all_1_tell_of_solved_prompts(reward: float, is_solved: bool):
    cause = cause_of([group(response(2), response(3), rewards=[reward] * 2)] * 2, grad_norm=0.0, loss=0.0)
    assert cause is not None and cause[0] == "equal rewards"
    assert ("the prompts are solved: use harder ones" in cause[1]) == is_solved
    assert ("easier" in cause[1]) != is_solved


def test_rewards_that_differ_by_rounding_are_equal():
    found = StepDiagnosis.of([group(response(2), response(2), rewards=[0.1 + 0.2, 0.3])], policy_version=0)
    assert found.num_equal_reward_groups == 1


def test_one_group_only():
    cause = cause_of([group(response(2), response(2), rewards=[1.0, 1.0])], grad_norm=0.0)
    assert cause is not None
    assert "the step's only group had equal rewards" in cause[1]
    assert "rollout.prompts_per_step" in cause[1]


@pytest.mark.parametrize(
    ("trained", "kind", "word"),
    [
        ({"learning_rate": 0.0}, "learning rate 0", "trainer.warmup_steps"),
        ({"grad_norm": 0.0}, "gradient 0", "clipped"),
    ],
)
def test_weights_that_do_not_move(trained: dict[str, float], kind: str, word: str):
    cause = cause_of([group(response(2), response(3), rewards=[0.0, 1.0])], **trained)
    assert cause is not None
    assert cause[0] == kind
    assert word in cause[1]


# What rules the responses


@pytest.mark.parametrize(("num_cut", "is_said"), [(8, False), (9, True), (10, True)])
def test_truncation_is_said_from_nine_tenths_on(num_cut: int, is_said: bool):
    """TRL#5697."""
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


# Endless repetition


def test_only_truncated_responses_are_repetitive():
    loop = np.tile([5, 6, 7], 20)
    responses = [Response(loop, finish_reason=reason) for reason in (FinishReason.LENGTH, FinishReason.EOS)]
    found = StepDiagnosis.of([group(*responses, rewards=[0.0, 1.0])], policy_version=0)
    assert found.num_repetitive == 1


def test_endless_repetition_is_said():
    loops = [Response(np.tile([5, 6], 20), finish_reason=FinishReason.LENGTH)] * 2
    warnings = StepDiagnosis.of([group(*loops, rewards=[0.0, 1.0])], policy_version=0).warnings()
    assert "2 of 2 responses repeat themselves to the end" in warnings["endless repetition"]


@pytest.mark.parametrize(
    ("tokens", "is_cycle"),
    [
        ([], False),
        ([7] * 31, False),
        ([7] * 32, True),
        (list(range(40)) + [7] * 32, True),
        (list(range(40)) + [7] * 31, False),
        ([1, 2, 3] * 11, True),
        (list(range(50)) * 4, True),
        (list(range(50)) * 3 + list(range(49)), False),
        (list(range(256)) * 4, True),
        (list(range(257)) * 4, False),
        ([1, 2] * 15 + [1, 3], False),
    ],
)
def test_cycles_by_hand(tokens: list[int], is_cycle: bool):
    assert ends_in_cycle(np.asarray(tokens, np.int64)) == is_cycle


@given(
    start=st.lists(st.integers(0, 2), max_size=20),
    cycle=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    num_tokens=st.integers(0, 70),
)
@example(start=[], cycle=[0, 1], num_tokens=32)
def test_cycle_against_a_search_of_all_periods(start: list[int], cycle: list[int], num_tokens: int):
    """Oracle: every period from 1 on, token by token, over lists."""
    tokens = start + (cycle * 70)[:num_tokens]

    def stands(period: int) -> bool:
        length = max(32, 4 * period)
        last = tokens[-length:]
        return len(tokens) >= length and all(last[i] == last[i - period] for i in range(period, length))

    assert ends_in_cycle(np.asarray(tokens, np.int64)) == any(stands(period) for period in range(1, 257))


# Rows of metrics.jsonl


def test_row_of_version_0_1_still_tells():
    row = {"num_groups": 2, "num_responses": 8, "num_equal_reward_groups": 2, "num_truncated": 0, "num_empty": 0}
    cause = explain_loss(StepFacts.of({**row, **TRAINED}))
    assert cause is not None
    assert cause.kind == "equal rewards"


@pytest.mark.parametrize("value", [float("nan"), None, "x"])
def test_what_is_no_number_is_not_known(value: float | str | None):
    facts = StepFacts.of({"entropy_mean": value, "num_responses": value, "num_updates": value})
    assert (facts.entropy_mean, facts.num_responses, facts.num_updates) == (None, 0, None)
