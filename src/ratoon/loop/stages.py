"""The stages between a list of prompts and the updates made from them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ratoon.algorithms import AlgorithmConfig, step_advantages
from ratoon.distributed import DataParallel, on_each_awaited, on_main_awaited, single_process
from ratoon.planner import CostModel, plan_step
from ratoon.planner.plan import RanksMeet
from ratoon.rewards import RewardPool, ScoredGroups
from ratoon.rollout import RolloutEngine
from ratoon.trainer import Update
from ratoon.types.rollouts import Prompt, RolloutGroup
from ratoon.types.sampling import SamplingParams


class Scores(Protocol):
    """Groups to the same groups with rewards, as `RewardPool.score` does."""

    async def score(self, groups: Sequence[RolloutGroup]) -> ScoredGroups: ...


@dataclass(frozen=True, slots=True)
class MainScores:
    """Rank 0 scores for all: a reward function sees what it would see of one process."""

    pool: RewardPool | None
    """None on the other ranks."""

    ranks: DataParallel

    async def score(self, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """The same on every rank. All ranks call it with the same groups."""

        async def score() -> ScoredGroups:
            assert self.pool is not None, "rank 0 has the reward functions"
            return await self.pool.score(groups)

        return await on_main_awaited(self.ranks, "rewards from rank 0", score)


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """One `engine.generate`."""

    prompt: Prompt
    group_size: int
    step: int
    """In which the group is, or was, begun."""

    begun: RolloutGroup | None = None
    """What an earlier call gave."""


async def generate_groups(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    sampling: SamplingParams,
    step: int,
    ranks: DataParallel | None = None,
) -> tuple[RolloutGroup, ...]:
    """One group for each prompt, in their order. Waits for the slowest; the first error cancels the others.

    ranks: call it together, with the same prompts; each generates for its share with its own engine, and all have all
    groups in the end. Draws depend on the prompts alone, not on who makes them.
    """
    calls = [GroupCall(prompt, group_size, step) for prompt in prompts]
    return await generate_calls(engine, calls, sampling=sampling, ranks=ranks)


async def generate_calls(
    engine: RolloutEngine,
    calls: Sequence[GroupCall],
    *,
    sampling: SamplingParams,
    max_new_tokens: int | None = None,
    ranks: DataParallel | None = None,
) -> tuple[RolloutGroup, ...]:
    """The group of each call, in their order; otherwise as `generate_groups`."""
    ranks = single_process() if ranks is None else ranks
    mine = calls[ranks.rank :: ranks.world_size]
    own = _generate(engine, mine, sampling=sampling, max_new_tokens=max_new_tokens)
    by_rank = await on_each_awaited(ranks, "responses of every rank", own)
    return tuple(by_rank[index % ranks.world_size][index // ranks.world_size] for index in range(len(calls)))


async def _generate(
    engine: RolloutEngine, calls: Sequence[GroupCall], *, sampling: SamplingParams, max_new_tokens: int | None
) -> tuple[RolloutGroup, ...]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                engine.generate(
                    call.prompt,
                    group_size=call.group_size,
                    sampling=sampling,
                    step=call.step,
                    begun=call.begun,
                    max_new_tokens=max_new_tokens,
                ),
                name=f"generate {call.prompt.id}",
            )
            for call in calls
        ]
    return tuple(task.result() for task in running)


def attach_advantages(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    *,
    penalties: Sequence[NDArray[np.float64]] | None = None,
) -> tuple[RolloutGroup, ...]:
    """The step's scored groups with the advantage of each response.

    penalties: for each group [N], taken from its rewards before they are compared; `rewards_N` stay as they are.
    """
    rewards = [group.rewards_N for group in groups if group.rewards_N is not None]
    assert len(rewards) == len(groups), "groups need rewards before advantages"
    if penalties is not None:
        rewards = [rewards_N - penalty_N for rewards_N, penalty_N in zip(rewards, penalties, strict=True)]
    advantages = step_advantages(rewards, algorithm)
    return tuple(replace(group, advantages_N=found) for group, found in zip(groups, advantages, strict=True))


def plan_updates(
    groups: Sequence[RolloutGroup],
    *,
    num_updates: int,
    num_ranks: int,
    max_rows_per_microbatch: int,
    cost: CostModel,
    share_prompts: bool = True,
    ranks_meet: RanksMeet = "step",
    keeps_prompts: bool = False,
) -> tuple[Update, ...]:
    """The groups dealt to `num_updates` optimizer updates, each planned over all ranks.

    Group i goes to update i mod num_updates, so that updates differ by at most one group; one that would have no group
    is left out. Without `share_prompts`, every response then stands as a group of its own: same updates and loss, and
    its prompt is computed for it alone. ranks_meet, keeps_prompts: as `plan_step` has them.
    """
    slices = [tuple(groups[first::num_updates]) for first in range(min(num_updates, len(groups)))]
    if not share_prompts:
        slices = [_one_response_each(chosen) for chosen in slices]
    return tuple(
        Update(
            groups=chosen,
            plan=plan_step(
                chosen,
                num_ranks=num_ranks,
                max_rows_per_microbatch=max_rows_per_microbatch,
                cost=cost,
                ranks_meet=ranks_meet,
                keeps_prompts=keeps_prompts,
            ),
        )
        for chosen in slices
    )


def _one_response_each(groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    return tuple(group.select([index]) for group in groups for index in range(group.group_size))
