"""What a step samples and what it trains on, above all under dynamic sampling."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
from tests.docs.test_metrics_reference import PAGE, documented
from tests.loop.tiny_run import TinyRun, metrics_rows

from ratoon.config import Recipe
from ratoon.data import SOURCE_KEY, PromptStream
from ratoon.loop.step_rollout import StepRollout, roll_out, without_truncated
from ratoon.metrics import MetricsLog
from ratoon.rewards import RewardPool, ScoredGroups
from ratoon.rewards.scored import RewardFailures
from ratoon.types import Prompt, Response, RolloutGroup
from ratoon.types.rollouts import FinishReason
from ratoon.types.sampling import SamplingParams

SUMS = (0.1 + 0.2, 0.3)
"""Equal on paper."""


class Engine:
    """Gives responses of two tokens, and none to the prompts of `silent`; remembers the ids it was asked with."""

    policy_version = 0

    def __init__(self, silent: Sequence[str] = ()) -> None:
        self.silent, self.asked = silent, list[str | int]()

    async def generate(
        self, prompt: Prompt, *, group_size: int, sampling: SamplingParams, step: int, **_: object
    ) -> RolloutGroup:
        self.asked.append(prompt.id)
        return RolloutGroup(prompt, () if prompt.id in self.silent else (Response(np.ones(2, int)),) * group_size)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def close(self) -> None: ...


class Rewards:
    """The rewards of each prompt, whose id may have a number added; a group keeps as many responses as it has."""

    def __init__(self, of: Mapping[str, Sequence[float]]) -> None:
        self.of = of

    async def score(self, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        found = [(group, np.array(self.of[str(group.prompt.id).partition("#")[0]], float)) for group in groups]
        return ScoredGroups(
            groups=tuple(
                RolloutGroup(group.prompt, group.responses[: rewards.size], rewards) for group, rewards in found
            ),
            failures=RewardFailures(),
        )


class Clock:
    def span(self, _: str) -> nullcontext[None]:
        return nullcontext()


def rolled(
    rewards: Mapping[str, Sequence[float]], *, silent: Sequence[str] = (), prompts_per_step: int = 2, **algorithm: Any
) -> tuple[StepRollout, list[str | int], PromptStream]:
    """One step over the prompts of `rewards`, in their order."""
    engine = Engine(silent)
    stream = PromptStream([Prompt(name, np.ones(1, int)) for name in rewards], seed=0, shuffle=False)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"source": "d.jsonl"},
            "reward": {"function": "exact-match"},
            "rollout": {"prompts_per_step": prompts_per_step, "group_size": 2},
            "algorithm": algorithm,
        }
    )
    found = asyncio.run(
        roll_out(
            0,
            recipe=recipe,
            prompts=stream,
            engine=engine,
            rewards=cast(RewardPool, Rewards(rewards)),
            metrics=cast(MetricsLog, Clock()),
            enter=lambda _: None,
        )
    )
    return found, engine.asked, stream


def ids(found: StepRollout) -> list[str | int]:
    return [group.prompt.id for group in found.groups]


def test_one_round_without_dynamic_sampling():
    found, asked, _ = rolled({"a": (0, 0), "b": (), "c": (0, 1)}, prompts_per_step=3)
    assert asked == ["a", "b", "c"] and ids(found) == ["a", "c"]
    assert (found.num_groups_asked, found.num_responses_asked, found.num_lost, found.num_rounds) == (3, 6, 2, 1)
    assert found.reward_mean == 0.25 and found.warnings() == {}


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts():
    found, asked, stream = rolled({"a": (1, 1), "b": (0, 1), "c": (0, 0), "d": (0, 1), "e": (0, 1)}, name="dapo")
    assert ids(found) == ["b", "d"]
    assert asked == ["a", "b", "c", "d"], "one is missing, and half of the groups teach: two more prompts"
    assert (found.num_rounds, found.num_groups_asked, found.num_responses_asked) == (2, 4, 8)
    assert found.reward_mean == 0.5, "of all that were sampled"
    assert found.warnings() == {}
    assert stream.state().position == 4


def test_rewards_that_differ_by_rounding_teach_nothing():
    """Their advantages are 0: such a group is no more use than one of equal rewards."""
    found, _, _ = rolled({"a": SUMS, "b": (0, 1), "c": (0, 1)}, name="dapo")
    assert ids(found) == ["b", "c"]


def test_rounds_run_out_and_the_step_says_so():
    found, _, _ = rolled({"a": (1, 1), "b": (0, 1), "c": (0, 0), "d": (0, 0)}, name="dapo", max_sampling_rounds=1)
    assert ids(found) == ["b"]
    (sentence,) = found.warnings().values()
    assert "of 2 groups sampled in 1 round only 1 had" in sentence and "instead of 2" in sentence
    assert "algorithm.max_sampling_rounds" in sentence


def test_where_nothing_teaches_the_first_groups_are_kept():
    found, asked, _ = rolled({"a": (1, 1), "b": (0, 0), "c": (0, 0)}, name="dapo", max_sampling_rounds=3)
    assert len(asked) == 6 and ids(found) == ["a", "b"] and found.num_rounds == 3
    assert found.warnings() == {}


def test_the_only_prompt_is_taken_again_under_another_id():
    """Draws depend on the id: under one id every round would draw the same responses."""
    _, asked, _ = rolled({"a": (1, 1)}, name="dapo", max_sampling_rounds=2)
    assert asked == ["a", "a#2", "a#3", "a#4"]


def test_lost_responses_of_every_round_are_counted():
    found, _, _ = rolled({"a": (0, 1), "b": (0, 1), "c": (1,), "d": (0, 1)}, silent=["a"], name="dapo")
    assert ids(found) == ["b", "d"]
    assert (found.num_groups_asked, found.num_lost) == (4, 3)


def test_masking_keeps_the_order_and_drops_what_is_empty():
    ended, cut = Response(np.ones(2, int)), Response(np.ones(3, int), finish_reason=FinishReason.LENGTH)
    groups = [
        RolloutGroup(Prompt(name, np.ones(1, int)), responses, np.array([0.0, 1.0]), np.array([-1.0, 1.0]))
        for name, responses in (("a", (cut, cut)), ("b", (cut, ended)))
    ]
    (kept,) = without_truncated(groups)
    assert kept.prompt.id == "b" and kept.responses == (ended,)
    assert kept.advantages_N is not None and kept.advantages_N.tolist() == [1.0]


@pytest.mark.parametrize("share", ["true", "false"])
def test_steps_of_which_all_is_masked_are_logged_and_the_others_trained(tiny: TinyRun, share: str):
    tiny.edit(("prompts_per_step = 2", "prompts_per_step = 1"), ("group_size = 4", "group_size = 2"))
    arguments = ("--algorithm.mask_truncated=true", "--rollout.max_response_tokens=1")
    outcome = tiny.train(*arguments, f"--planner.share_prompts={share}")
    assert (outcome.status, outcome.err.count("Traceback")) == (0, 0)
    rows = metrics_rows(tiny.run_dir, "train")
    masked = [row for row in rows if row["num_truncated"] == row["num_responses"]]
    assert 0 < len(masked) < len(rows)
    for row in rows:
        assert row["num_loss_tokens"] == row["num_responses"] - row["num_truncated"]
        assert ("grad_norm" in row) == (row["num_loss_tokens"] > 0)


def test_every_name_in_a_training_row_is_explained(tiny: TinyRun):
    """With a KL penalty in the reward, whose scoring is a phase of its own."""
    assert tiny.train("--algorithm.name=rloo", "--algorithm.kl_coefficient=0.1", "--trainer.num_steps=2").status == 0
    names = {name for row in metrics_rows(tiny.run_dir, "train") for name in row} - {"step", "phase", "unix_s"}
    phases = {name.removeprefix("seconds_in_") for name in names if name.startswith("seconds_in_")}
    assert {"generate", "reward", "reference", "update"} <= phases
    named = PAGE.read_text().partition("seconds_in_PHASE")[2].partition("## ")[0]
    assert {phase for phase in phases if f"`{phase}`" not in named} == set()
    assert {name for name in names if not name.startswith("seconds_in_")} - documented(
        "Rows of a training step"
    ) == set()


def test_rewards_are_told_by_source():
    def group(source: str, rewards: Sequence[float]) -> RolloutGroup:
        prompt = Prompt(source, np.array([1]), metadata={SOURCE_KEY: source})
        return RolloutGroup(prompt, (Response(np.array([1])),) * len(rewards), np.array(rewards, float))

    groups = (group("a", [0, 1, 1]), group("b", []), group("c", [4]), group("a", [0]))
    rollout = StepRollout(
        scored=ScoredGroups(groups=groups, failures=RewardFailures()),
        groups=groups,
        num_groups_asked=4,
        num_responses_asked=12,
        num_rounds=1,
        num_groups_wanted=4,
        num_teaching=None,
        num_generated_tokens=12,
    )
    assert rollout.reward_mean_by_source == {"a": 0.5, "c": 4.0}, "over responses; one that lost all of them has none"
    assert rollout.num_lost == 7
