"""Group-relative advantages."""

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import (
    AlgorithmConfig,
    grpo_advantages,
    reinforce_advantages,
    reinforce_baseline_advantages,
    rloo_advantages,
    step_advantages,
)

rewards = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=17)


def oracle(values: list[float], normalize_by_std: bool) -> list[float]:
    mean = statistics.fmean(values)
    scale = statistics.stdev(values) if normalize_by_std else 1.0
    return [(value - mean) / scale for value in values]


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0, 0.0, 0.0], [-3.5, 2.25, 7.0, 7.0, 0.1], list(range(16))])
def test_matches_the_formula(values: list[float], normalize_by_std: bool):
    advantages_N = grpo_advantages(values, normalize_by_std=normalize_by_std)
    assert advantages_N.dtype == np.float64
    np.testing.assert_allclose(advantages_N, oracle(values, normalize_by_std), rtol=1e-12, atol=1e-15)


def test_one_hot_reward_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, sample deviation 1/2."""
    assert grpo_advantages([1, 0, 0, 0]).tolist() == [1.5, -0.5, -0.5, -0.5]
    assert grpo_advantages([1, 0, 0, 0], normalize_by_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


@given(rewards)
def test_advantages_sum_to_zero(values: list[float]):
    for normalize_by_std in (True, False):
        advantages_N = grpo_advantages(values, normalize_by_std=normalize_by_std)
        assert abs(advantages_N.sum()) <= 1e-9 * max(1.0, np.abs(advantages_N).max()) * len(values)


@given(rewards, st.floats(1e-200, 1e200))
def test_the_unit_of_the_reward_does_not_matter(values: list[float], scale: float):
    spread = max(values) - min(values)
    if spread < 1e-6:  # what rounding of value * scale itself may change
        return
    np.testing.assert_allclose(
        grpo_advantages(np.asarray(values) * scale), grpo_advantages(values), rtol=1e-6, atol=1e-9
    )


@given(rewards, st.floats(1e-3, 1e3))
def test_dr_grpo_scales_with_the_reward(values: list[float], scale: float):
    scaled_N = grpo_advantages(np.asarray(values) * scale, normalize_by_std=False)
    np.testing.assert_allclose(
        scaled_N, scale * grpo_advantages(values, normalize_by_std=False), rtol=1e-9, atol=1e-9 * scale
    )


@given(rewards, st.randoms())
def test_the_order_of_responses_does_not_matter(values: list[float], random):
    order = list(range(len(values)))
    random.shuffle(order)
    np.testing.assert_allclose(
        grpo_advantages([values[index] for index in order]), grpo_advantages(values)[order], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 1 / 3, 1e300, -1e-300, 5e-324])
@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(value: float, normalize_by_std: bool, group_size: int):
    """Covers OpenRLHF#1250 (a group of one) and TRL#3452 (loss is 0 because all rewards are equal)."""
    advantages_N = grpo_advantages([value] * group_size, normalize_by_std=normalize_by_std)
    assert advantages_N.tolist() == [0.0] * group_size


def test_rewards_equal_up_to_rounding_are_equal():
    assert grpo_advantages([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]


def test_a_small_real_difference_counts_in_full():
    """No epsilon: rewards of 0 and 1e-9 rank like rewards of 0 and 1."""
    np.testing.assert_allclose(grpo_advantages([0.0, 1e-9]), grpo_advantages([0.0, 1.0]), rtol=1e-12)


@pytest.mark.parametrize("largest", [1e308, 1e-308])
def test_extreme_rewards_neither_overflow_nor_vanish(largest: float):
    np.testing.assert_allclose(
        grpo_advantages([largest, -largest, largest]), grpo_advantages([1.0, -1.0, 1.0]), rtol=1e-12
    )


def test_no_responses():
    assert grpo_advantages([]).shape == (0,)


def test_score_zero_is_a_score():
    """Covers OpenRLHF#1219 (score 0.0 treated as missing)."""
    assert grpo_advantages([0.0, 1.0, 0.0]).tolist() == pytest.approx(oracle([0.0, 1.0, 0.0], True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_refuses_rewards_that_are_not_finite(bad: float):
    with pytest.raises(ValueError, match=r"1 of 3 rewards are not finite \(response 1 got"):
        grpo_advantages([1.0, bad, 0.0])


def test_refuses_a_missing_reward():
    with pytest.raises(ValueError, match="not finite"):
        grpo_advantages([1.0, None, 0.0])  # pyright: ignore[reportArgumentType]


def test_refuses_two_dimensions():
    with pytest.raises(ValueError, match=r"must be 1-D, one for each response, got shape \(2, 2\)"):
        grpo_advantages([[1.0, 0.0], [0.0, 1.0]])


groups_of_a_step = st.lists(st.lists(st.floats(-100, 100, allow_subnormal=False), max_size=7), max_size=6)
NAMES = ("grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "dapo", "gspo", "cispo")


def step_oracle(groups: list[list[float]], name: str) -> list[float]:
    """Each response in turn, from the papers' definitions."""
    everything = [reward for group in groups for reward in group]
    centred = [reward - statistics.fmean(group) for group in groups for reward in group]
    found: list[float] = []
    for group in groups:
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            if name == "reinforce++":
                found.append((reward - statistics.fmean(everything)) / statistics.stdev(everything))
            elif not others:
                found.append(0.0)
            elif name == "rloo":
                found.append(reward - statistics.fmean(others))
            elif name == "reinforce++-baseline":
                found.append((reward - statistics.fmean(group)) / statistics.stdev(centred))
            elif name == "dr-grpo":
                found.append(reward - statistics.fmean(group))
            else:
                found.append((reward - statistics.fmean(group)) / statistics.stdev(group))
    return found


def is_spread(values: list[float]) -> bool:
    return len(values) < 2 or max(values) - min(values) > 1e-6


@pytest.mark.parametrize("name", NAMES)
@given(groups=groups_of_a_step)
def test_every_algorithms_step_matches_its_definition(name: str, groups: list[list[float]]):
    """Groups of different sizes, of one and of none."""
    everything = [reward for group in groups for reward in group]
    if not all(is_spread(group) for group in groups) or not is_spread(everything):
        return  # equal to rounding is 0 here, and noise in the oracle
    if name == "reinforce++" and len(everything) < 2:
        return
    if name == "reinforce++-baseline" and all(len(group) < 2 for group in groups):
        return
    found = step_advantages(groups, AlgorithmConfig.model_validate({"name": name}))
    assert [advantages_N.shape for advantages_N in found] == [(len(group),) for group in groups]
    flat = np.concatenate([np.empty(0), *found])
    np.testing.assert_allclose(flat, step_oracle(groups, name), rtol=1e-6, atol=1e-8)


def test_the_batch_advantages_by_hand():
    """Rewards 1, 0 and 5, 3. Mean 2.25; centred in groups: 0.5, -0.5, 1, -1, of deviation sqrt(2.5 / 3)."""
    batch = reinforce_advantages([[1.0, 0.0], [5.0, 3.0]])
    np.testing.assert_allclose(np.concatenate(batch), np.array([-1.25, -2.25, 2.75, 0.75]) / np.sqrt(14.75 / 3))
    baseline = reinforce_baseline_advantages([[1.0, 0.0], [5.0, 3.0]])
    np.testing.assert_allclose(np.concatenate(baseline), np.array([0.5, -0.5, 1.0, -1.0]) / np.sqrt(2.5 / 3))


def test_leave_one_out_by_hand():
    assert rloo_advantages([1, 0, 0, 0]).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_all_over_the_step_give_exactly_zero(name: str):
    config = AlgorithmConfig.model_validate({"name": name})
    for rewards in ([[0.1] * 3, [0.1] * 2], [[0.1 + 0.2, 0.3, 0.3]], [[], [2.0]], [[]]):
        found = step_advantages(rewards, config)
        assert [advantages_N.tolist() for advantages_N in found] == [[0.0] * len(group) for group in rewards]
    assert step_advantages([], config) == ()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce++"])
def test_a_group_of_one_teaches_nothing_where_siblings_are_compared(name: str):
    """OpenRLHF#1250: dr_grpo with one response a prompt does nothing. `compares_siblings` lets a recipe refuse it."""
    config = AlgorithmConfig.model_validate({"name": name})
    found = step_advantages([[1.0], [0.0]], config)
    assert config.compares_siblings
    assert [advantages_N.tolist() for advantages_N in found] == [[0.0], [0.0]]


def test_a_group_of_one_teaches_where_the_step_is_the_measure():
    config = AlgorithmConfig(name="reinforce++")
    assert not config.compares_siblings
    first, second = step_advantages([[1.0], [0.0]], config)
    assert first.tolist() == pytest.approx([0.5**0.5]) and second.tolist() == pytest.approx([-(0.5**0.5)])


def test_a_nearly_equal_group_is_not_blown_up_by_the_baseline_variant():
    nearly, _ = reinforce_baseline_advantages([[0.0, 1e-6], [0.0, 1.0]])
    assert np.abs(nearly).max() < 1e-5
    assert np.abs(grpo_advantages([0.0, 1e-6])).max() > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_finite_is_refused_in_every_algorithm(name: str):
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite"):
        step_advantages([[0.0, 1.0], [1.0, float("nan")]], AlgorithmConfig.model_validate({"name": name}))


@pytest.mark.parametrize("function", [reinforce_advantages, reinforce_baseline_advantages])
def test_extreme_rewards_over_a_step_neither_overflow_nor_vanish(function: Any):
    for scale in (1e307, 1e-300):
        found = np.concatenate(function([[scale, -scale], [scale]]))
        np.testing.assert_allclose(found, np.concatenate(function([[1.0, -1.0], [1.0]])), rtol=1e-12)
