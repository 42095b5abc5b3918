"""Group-relative advantages."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import grpo_advantages

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
