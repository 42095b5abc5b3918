"""Rewards for a group."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ratoon.rewards.checks import checked_reward
from ratoon.types.errors import UserError
from ratoon.types.protocols import RewardFn
from ratoon.types.rollouts import RolloutGroup


def score(group: RolloutGroup, reward_fn: RewardFn) -> RolloutGroup:
    """The group with `rewards_N` [N] float64 from `reward_fn`, and without advantages of earlier rewards.

    Raises UserError unless it returns exactly one finite number for each response.
    """
    name = reward_fn.__qualname__ if inspect.isfunction(reward_fn) else repr(reward_fn)
    where = f"{name} of prompt {group.prompt.id!r}"
    values: object = reward_fn(group.prompt, group.responses)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise UserError(f"{where} returned {type(values).__name__}; it must return a list of one float a response")
    shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
    if shape != (group.group_size,):
        got = f"shape {shape}" if isinstance(values, np.ndarray) else f"{len(values)} rewards"
        raise UserError(f"{where} returned {got} for {group.group_size} responses; return one reward for each")
    rewards = [checked_reward(value, f"{where}, response {index},") for index, value in enumerate(values)]
    return replace(group, rewards_N=np.array(rewards, np.float64), advantages_N=None)
