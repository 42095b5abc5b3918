"""How much better each response is than others: of its group, or of the whole step."""

# Shape letters: N responses of one group.

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratoon.algorithms.config import AlgorithmConfig

# Sums of weighted reward components that are equal on paper differ by a few last bits.
_EQUAL_TO_ROUNDING = 1e-12


def step_advantages(rewards_by_group: Sequence[ArrayLike], config: AlgorithmConfig) -> tuple[NDArray[np.float64], ...]:
    """The advantage of every response of a step, from all of its groups: [N] for each, in their order.

    rewards_by_group: [N] finite rewards of each group; groups may differ in size, and be empty. Where `config.kl_in` is
        "reward", `kl_coefficient` times the divergences of `Trainer.kl_to_reference` is subtracted from them before.

    Raises ValueError where a reward is NaN or infinite.
    """
    groups = [_checked(rewards_N) for rewards_N in rewards_by_group]
    match config.advantage:
        case "group":
            return tuple(grpo_advantages(rewards_N, normalize_by_std=config.normalize_by_std) for rewards_N in groups)
        case "leave-one-out":
            return tuple(rloo_advantages(rewards_N) for rewards_N in groups)
        case "batch":
            return reinforce_advantages(groups)
        case "group-then-batch":
            return reinforce_baseline_advantages(groups)


def grpo_advantages(rewards_N: ArrayLike, *, normalize_by_std: bool = True) -> NDArray[np.float64]:
    """Rewards of one group, centred and, by default, in units of their standard deviation.

    GRPO, arXiv 2402.03300, §4.1.2 (outcome supervision): (r - mean) / std. Without `normalize_by_std`
    it is r - mean: Dr.GRPO, arXiv 2503.20783, §3.2.

    rewards_N: [N] finite numbers. Returns [N] float64 that sum to 0.

    The deviation is that of a sample (denominator N - 1), as in TRL and verl, so that a learning
    rate tuned there means the same here. No epsilon is added to it: an epsilon would make the
    advantages depend on the unit of the reward. Instead, rewards that are equal (to 1e-12 of the
    largest magnitude) give exactly 0, and so does a group of one, which has nobody to be compared with.

    Raises ValueError where a reward is NaN or infinite, or the rewards are not 1-D.
    """
    return _centred(_checked(rewards_N), divide_by_std=normalize_by_std)


def rloo_advantages(rewards_N: ArrayLike) -> NDArray[np.float64]:
    """Each reward less the mean of the group's other rewards.

    RLOO, arXiv 2402.14740 (the leave-one-out estimator; Kool et al. 2019). The baseline does not contain the reward
    it is subtracted from, so the gradient is unbiased. It is N / (N - 1) times the centred reward.

    rewards_N: [N] finite numbers. Returns [N] float64 that sum to 0; equal rewards and a group of one give exactly 0.
    """
    rewards = _checked(rewards_N)
    return _centred(rewards, divide_by_std=False) * (rewards.size / max(rewards.size - 1, 1))


def reinforce_advantages(rewards_by_group: Sequence[ArrayLike]) -> tuple[NDArray[np.float64], ...]:
    """Rewards in units of the whole step: centred by its mean, divided by its standard deviation.

    REINFORCE++, arXiv 2501.03262 (global advantage normalisation). Mean and deviation run over responses, each counted
    once whatever its length; a prompt needs no siblings. Rewards that are equal all over the step give exactly 0.
    """
    groups = [_checked(rewards_N) for rewards_N in rewards_by_group]
    return _over_the_step(groups)


def reinforce_baseline_advantages(rewards_by_group: Sequence[ArrayLike]) -> tuple[NDArray[np.float64], ...]:
    """Rewards centred within their group, in units of the deviation that remains over the whole step.

    REINFORCE++ with baseline, arXiv 2501.03262. A group whose rewards are nearly equal is not blown up, as its own
    deviation would do; equal rewards and a group of one give 0.
    """
    return _over_the_step([_centred(_checked(rewards_N), divide_by_std=False) for rewards_N in rewards_by_group])


def _over_the_step(groups: Sequence[NDArray[np.float64]]) -> tuple[NDArray[np.float64], ...]:
    normalized = _centred(np.concatenate([np.empty(0), *groups]), divide_by_std=True)
    ends = np.cumsum([group.size for group in groups])
    return tuple(np.split(normalized, ends[:-1])) if groups else ()


def _checked(rewards_N: ArrayLike) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_N, np.float64)
    if rewards.ndim != 1:
        raise ValueError(f"rewards of one group must be 1-D, one for each response, got shape {rewards.shape}")
    is_bad_N = ~np.isfinite(rewards)
    if is_bad_N.any():
        first = int(is_bad_N.argmax())
        raise ValueError(
            f"{int(is_bad_N.sum())} of {rewards.size} rewards are not finite (response {first} got {rewards[first]}); "
            "make the reward function return finite numbers"
        )
    return rewards


def are_equal(rewards_N: ArrayLike) -> bool:
    """Whether there is nothing to prefer among rewards: they differ by rounding at most, or there is one, or none.

    Such rewards have advantages of exactly 0 when compared with each other.
    """
    scaled, _ = _scaled(np.asarray(rewards_N, np.float64))
    return scaled.size < 2 or bool(np.ptp(scaled) <= _EQUAL_TO_ROUNDING * np.abs(scaled).max())


def _scaled(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Values over a power of two, and its exponent: near 1 without rounding, so that squares and sums stay finite."""
    exponent = int(np.frexp(float(np.abs(values).max(initial=0.0)))[1])
    return np.ldexp(values, -exponent), exponent


def _centred(values: NDArray[np.float64], *, divide_by_std: bool) -> NDArray[np.float64]:
    """Values less their mean, exactly 0 where they are equal to rounding."""
    if are_equal(values):
        return np.zeros(values.size)
    scaled, exponent = _scaled(values)
    centred = scaled - scaled.mean()
    return centred / centred.std(ddof=1) if divide_by_std else np.ldexp(centred, exponent)
