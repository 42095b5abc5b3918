"""How much better each response of a group did than its siblings."""

# Shape letters: N responses of one group.

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Sums of weighted reward components that are equal on paper differ by a few last bits.
_EQUAL_TO_ROUNDING = 1e-12


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
    largest = float(np.abs(rewards).max(initial=0.0))
    # A power of two brings the rewards near 1 without rounding: squares of huge or tiny rewards stay finite.
    exponent = int(np.frexp(largest)[1])
    scaled_N = np.ldexp(rewards, -exponent)
    if rewards.size < 2 or np.ptp(scaled_N) <= _EQUAL_TO_ROUNDING * np.abs(scaled_N).max():
        return np.zeros(rewards.size)
    centred_N = scaled_N - scaled_N.mean()
    return centred_N / centred_N.std(ddof=1) if normalize_by_std else np.ldexp(centred_N, exponent)
