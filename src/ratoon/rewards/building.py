"""The reward pool under the names that the loop still calls."""

# TODO: goes when loop.inputs makes the RewardPool itself.

from collections.abc import Collection, Sequence
from pathlib import Path

from ratoon.rewards.config import RewardConfig
from ratoon.rewards.pool import RewardPool
from ratoon.types.protocols import RewardFn
from ratoon.types.rollouts import Prompt, Response, RolloutGroup


class _PooledFn:
    """A RewardFn that asks a pool."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool = pool

    def __call__(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        (group,) = self.pool.score_now([RolloutGroup(prompt, tuple(responses))]).groups
        assert group.rewards_N is not None, "scored groups have rewards"
        return group.rewards_N.tolist()


def build_reward_fn(config: RewardConfig, *, base_dir: Path, columns: Collection[str] | None = None) -> RewardFn:
    """A reward function that asks workers; the limits of length shaping are not known to it."""
    pool = RewardPool(config, base_dir=base_dir, max_response_tokens=2**31)
    pool.check([], columns)
    return _PooledFn(pool)


def check_prompts(config: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UserError naming the first prompt that the built-in functions of `config` could not score."""
    if config.python_files:
        return
    with RewardPool(config, base_dir=Path(), max_response_tokens=2**31) as pool:
        pool.check(prompts)
