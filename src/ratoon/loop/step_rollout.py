"""The scored groups that one step trains on."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.algorithms import are_equal
from ratoon.config.recipe import Recipe
from ratoon.data import SOURCE_KEY, PromptStream
from ratoon.distributed import DataParallel
from ratoon.loop.partial_rollout import PartialRollout, roll_out_parts
from ratoon.loop.repeats import tell_apart
from ratoon.loop.stages import Scores, generate_groups
from ratoon.loop.waiting_groups import NONE_WAITING, WaitingGroups
from ratoon.metrics import MetricsLog
from ratoon.rewards import ScoredGroups
from ratoon.rewards.scored import merge
from ratoon.rollout import RolloutConfig, RolloutEngine
from ratoon.types.rollouts import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollout:
    """What a step sampled, and what it trains on."""

    scored: ScoredGroups
    """Every group that was sampled; one that lost all its responses is empty, or missing where the engine gave none."""

    groups: tuple[RolloutGroup, ...]
    """To train on, none of them empty. All that were sampled, or under dynamic sampling those that teach something."""

    num_groups_asked: int
    """Prompts taken for it, over all rounds."""

    num_responses_asked: int
    num_rounds: int
    """Rollouts it took; more than 1 under dynamic sampling only."""

    num_groups_wanted: int
    num_teaching: int | None
    """Of `groups`, under dynamic sampling: all of them, or 0 where nothing that was sampled teaches."""

    num_generated_tokens: int
    """Drawn in this step; under partial rollouts not those of `groups`, which earlier steps drew in part."""

    waiting: WaitingGroups = NONE_WAITING
    """Under partial rollouts, what the next step goes on with."""

    @property
    def num_lost(self) -> int:
        """Responses that the engine did not give, or whose reward failed and was dropped."""
        return self.num_responses_asked - sum(group.group_size for group in self.scored.groups)

    @property
    def reward_mean(self) -> float:
        """Of every response sampled: what the policy earns, whichever groups are trained on."""
        return float(self._rewards.mean()) if self._rewards.size else 0.0

    @property
    def reward_std(self) -> float:
        return float(self._rewards.std()) if self._rewards.size else 0.0

    @property
    def reward_mean_by_source(self) -> dict[str, float]:
        """By its name, where the recipe has several sources: what the policy earns on its prompts."""
        found: dict[str, list[NDArray[np.float64]]] = {}
        for group in self.scored.groups:
            if SOURCE_KEY in group.prompt.metadata and group.rewards_N is not None and group.group_size:
                found.setdefault(str(group.prompt.metadata[SOURCE_KEY]), []).append(group.rewards_N)
        return {name: float(np.concatenate(rewards).mean()) for name, rewards in found.items()}

    def warnings(self) -> dict[str, str]:
        """By a short name of its kind, a sentence about a step that dynamic sampling could not fill."""
        if not self.num_teaching or self.num_teaching >= self.num_groups_wanted:
            return {}  # a step of which nothing teaches is told of as any other
        rounds = "1 round" if self.num_rounds == 1 else f"{self.num_rounds} rounds"
        return {
            "unfilled step": (
                f"of {self.num_groups_asked} groups sampled in {rounds} only {self.num_teaching} had "
                f"rewards that differ, and the step trains on these instead of {self.num_groups_wanted}; use easier or "
                "harder prompts, a larger rollout.group_size or a finer reward, or raise algorithm.max_sampling_rounds"
            )
        }

    @property
    def _rewards(self) -> NDArray[np.float64]:
        scored = [group.rewards_N for group in self.scored.groups if group.rewards_N is not None]
        return np.concatenate([np.zeros(0), *scored])


async def roll_out(
    step: int,
    *,
    recipe: Recipe,
    prompts: PromptStream,
    engine: RolloutEngine,
    rewards: Scores,
    metrics: MetricsLog,
    enter: Callable[[str], None],
    ranks: DataParallel | None = None,
    waiting: WaitingGroups = NONE_WAITING,
) -> StepRollout:
    """Samples and scores `rollout.prompts_per_step` groups; under partial rollouts those that `roll_out_parts` gives.

    Under dynamic sampling (DAPO, arXiv 2503.14476, §3.2), groups whose rewards are all equal are replaced by groups of
    the next prompts, for `algorithm.max_sampling_rounds` rounds at most; then fewer groups have to do. Where no group
    at all teaches anything, the first ones are returned as they are: the step then says why it is useless.

    enter: told the name of each phase as it begins. ranks: share the generation; they call it together.
    waiting: what the step before left, under partial rollouts.
    """
    rollout, wanted = recipe.rollout, recipe.rollout.prompts_per_step
    if rollout.max_new_tokens_per_step is not None:
        with _phase("generate", enter, metrics):
            drawn = await roll_out_parts(
                step,
                waiting=waiting,
                config=rollout,
                seed=recipe.run.seed,
                prompts=prompts,
                engine=engine,
                ranks=ranks,
            )
        with _phase("reward", enter, metrics):
            return await _scored_parts(drawn, rewards, rollout)
    sampling = rollout.sampling_params(recipe.run.seed)
    seen: Counter[str | int] = Counter()
    parts: list[ScoredGroups] = []
    teaching: list[RolloutGroup] = []
    num_groups_asked, num_prompts = 0, wanted
    for _ in range(recipe.algorithm.max_sampling_rounds or 1):
        with _phase("generate", enter, metrics):
            taken = tell_apart(prompts.take(num_prompts), seen)
            generated = await generate_groups(
                engine, taken, group_size=rollout.group_size, sampling=sampling, step=step, ranks=ranks
            )
        with _phase("reward", enter, metrics):
            parts.append(await rewards.score([group for group in generated if group.group_size]))
        num_groups_asked += num_prompts
        teaching += [group for group in parts[-1].groups if group.group_size and _teaches(group, recipe)]
        if len(teaching) >= wanted:
            break
        num_prompts = _num_prompts_next(wanted - len(teaching), len(teaching) / num_groups_asked, most=wanted)
    return _joined(parts, teaching, num_groups_asked, recipe)


def _joined(
    parts: Sequence[ScoredGroups], teaching: Sequence[RolloutGroup], num_groups_asked: int, recipe: Recipe
) -> StepRollout:
    """What all rounds of a step sampled."""
    rollout, wanted = recipe.rollout, recipe.rollout.prompts_per_step
    scored = merge(parts)
    whole = [group for group in scored.groups if group.group_size]
    return StepRollout(
        scored=scored,
        groups=tuple(teaching[:wanted] or whole[:wanted]),
        num_groups_asked=num_groups_asked,
        num_responses_asked=num_groups_asked * rollout.group_size,
        num_rounds=len(parts),
        num_groups_wanted=wanted,
        num_teaching=min(len(teaching), wanted) if recipe.algorithm.dynamic_sampling else None,
        num_generated_tokens=sum(sum(group.response_lengths) for group in scored.groups),
    )


@contextmanager
def _phase(name: str, enter: Callable[[str], None], metrics: MetricsLog) -> Iterator[None]:
    enter(name)
    with metrics.span(name):
        yield


async def _scored_parts(drawn: PartialRollout, rewards: Scores, rollout: RolloutConfig) -> StepRollout:
    """The complete groups with rewards: those that wait have none yet."""
    scored = await rewards.score([group for group in drawn.complete if group.group_size])
    return StepRollout(
        scored=scored,
        groups=tuple(group for group in scored.groups if group.group_size),
        num_groups_asked=len(drawn.complete),
        num_responses_asked=len(drawn.complete) * rollout.group_size,
        num_rounds=1,
        num_groups_wanted=rollout.prompts_per_step,
        num_teaching=None,
        num_generated_tokens=drawn.num_generated_tokens,
        waiting=drawn.waiting,
    )


def _teaches(group: RolloutGroup, recipe: Recipe) -> bool:
    """Whether a step without dynamic sampling, or with it, keeps the group."""
    if not recipe.algorithm.dynamic_sampling:
        return True
    assert group.rewards_N is not None, "a scored group has rewards"
    return not are_equal(group.rewards_N)


def _num_prompts_next(num_missing: int, share_that_teaches: float, *, most: int) -> int:
    """As many prompts as will probably fill the step, at most a whole step's."""
    return most if share_that_teaches == 0 else min(math.ceil(num_missing / share_that_teaches), most)


def without_truncated(groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """The groups without responses that the token budget ended; groups that have no others are left out.

    DAPO's overlong filtering, arXiv 2503.14476, §3.4. Called after advantages, in which they still count.
    """
    kept = [
        group.select([index for index, response in enumerate(group.responses) if not response.is_truncated])
        for group in groups
    ]
    return tuple(group for group in kept if group.group_size)
