"""Mean reward and pass@k of held-out prompts, with honest intervals, whatever is lost on the way."""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loop.tiny_run import Outcome, TinyRun, metrics_rows, traces, write_tiny_recipe

from ratoon.config.evaluation import EvaluationConfig
from ratoon.loop.evaluation import Answers, Evaluation, evaluate, measure, pass_at_k, pass_interval
from ratoon.trainer.best_checkpoint import best_checkpoint
from ratoon.types import Prompt, Response, RolloutGroup
from ratoon.types.rollouts import FinishReason
from ratoon.types.sampling import SamplingParams


class ScriptedEngine:
    """Answers each prompt with responses of 1, 2, 3, ... tokens; gives none for the prompts of `silent`."""

    policy_version = 0

    def __init__(self, silent: Sequence[str] = ()) -> None:
        self.silent = silent
        self.calls: list[tuple[str | int, int, SamplingParams, int]] = []

    async def generate(
        self, prompt: Prompt, *, group_size: int, sampling: SamplingParams, step: int, **_: object
    ) -> RolloutGroup:
        self.calls.append((prompt.id, group_size, sampling, step))
        lengths = () if prompt.id in self.silent else range(1, group_size + 1)
        return RolloutGroup(
            prompt,
            tuple(
                Response(np.full(n, 7), finish_reason=FinishReason.LENGTH if n == group_size > 1 else FinishReason.EOS)
                for n in lengths
            ),
        )

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def close(self) -> None: ...


def prompts(*ids: str) -> list[Prompt]:
    return [Prompt(name, np.array([1, 2])) for name in ids]


def scored(*rewards: Sequence[float]) -> Answers:
    """One prompt for each list of rewards, nothing lost."""
    groups = tuple(
        RolloutGroup(Prompt(index, np.ones(1, int)), (Response(np.ones(1, int)),) * len(values), np.array(values))
        for index, values in enumerate(rewards)
    )
    return Answers(num_responses_asked=sum(len(values) for values in rewards), generated=groups, scored=groups)


def run_evaluation(engine: ScriptedEngine, *ids: str, drop: Sequence[str] = (), **config: Any) -> Evaluation | None:
    """Scores a response by its length, and loses the first response of the prompts in `drop`."""

    async def score(groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        whole = [replace(group, rewards_N=np.array(group.response_lengths, float)) for group in groups]
        return [g.select(range(1, g.group_size)) if g.prompt.id in drop else g for g in whole]

    return asyncio.run(
        evaluate(
            engine,
            prompts(*ids),
            config=EvaluationConfig(**config),
            training=SamplingParams(temperature=0.7, top_p=0.9, max_response_tokens=11, seed=5),
            score=score,
        )
    )


def test_figures_by_hand():
    """Rewards 1, 2, 3 for each of two prompts, 3 passing."""
    found = run_evaluation(ScriptedEngine(), "a", "b", group_size=3, pass_threshold=3)
    assert found is not None
    assert (found.reward_mean, found.reward_standard_error) == (2.0, 0.0)
    assert (found.num_prompts, found.num_responses, found.num_lost_responses) == (2, 6, 0)
    assert found.truncated_fraction == pytest.approx(1 / 3)
    assert found.response_tokens_mean == 2.0
    assert {rate.k: rate.mean for rate in found.pass_rates} == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1.0})
    row = found.metrics()
    assert row["pass_at_2"] == pytest.approx(2 / 3)
    assert {"pass_at_1_low", "pass_at_1_high"} <= row.keys()


def test_standard_error_is_clustered_by_prompt():
    """Two answers that agree are one observation: over responses the error would be smaller by the square root of 2."""
    found = measure(scored([0, 0], [1, 1], [0, 0]), group_size=2, pass_threshold=1)
    assert found.reward_standard_error == pytest.approx(np.std([0, 1, 0], ddof=1) / math.sqrt(3))
    low, high = found.reward_interval
    assert (high - low) / 2 == pytest.approx(1.959964 * found.reward_standard_error)
    assert (high + low) / 2 == pytest.approx(found.reward_mean)


def test_ten_of_ten_right_answers_leave_room_for_a_wrong_one():
    """Wilson's interval by hand (z = 1.96): 10 of 10 are [0.7225, 1]; 9 of 10 are [0.596, 0.982], 1.126 if normal."""
    for num_right, low, high in ((10, 0.7225, 1.0), (9, 0.5958, 0.9821), (0, 0.0, 0.2775)):
        rewards = scored(*[[1.0]] * num_right, *[[0.0]] * (10 - num_right))
        found = measure(rewards, group_size=1, pass_threshold=1, reward_bounds=(0, 1))
        assert found.reward_interval == pytest.approx((low, high), abs=1e-4)
    halves = measure(scored(*[[-0.5]] * 9, [0.0]), group_size=1, pass_threshold=1, reward_bounds=(-0.5, 0))
    assert halves.reward_interval == pytest.approx((-0.9821 / 2, -0.5958 / 2), abs=1e-4)


@pytest.mark.parametrize("bound", [0.1 + 0.2, 0.3])
def test_rewards_that_miss_a_bound_by_rounding_are_at_it(bound: float):
    """A weighted sum of components, and the sum of their bounds: Python adds those up more exactly from 3.12 on."""
    for seen in (0.1 + 0.2, 0.3):
        found = measure(scored(*[[seen]] * 10), group_size=1, pass_threshold=1, reward_bounds=(0, bound))
        assert found.reward_interval == pytest.approx((0.7225 * 0.3, 0.3), abs=1e-4)


def test_an_interval_ends_at_the_bounds_that_are_known():
    high_ones = scored([1.0], [0.9], [1.0], [0.5])
    free = measure(high_ones, group_size=1, pass_threshold=1).reward_interval
    assert free[1] > 1.0, "a reward function may give more"
    bounded = measure(high_ones, group_size=1, pass_threshold=1, reward_bounds=(0, 1)).reward_interval
    assert bounded == (free[0], 1.0)
    beyond = measure(scored([1.2], [0.9]), group_size=1, pass_threshold=1, reward_bounds=(0, 1))
    assert beyond.reward_interval[1] > 1.2, "what was seen counts, whatever was said"
    assert all(map(math.isnan, measure(scored(), group_size=1, pass_threshold=1).reward_interval))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=2, max_size=30))
def test_an_interval_within_bounds_holds_the_mean(rewards: list[list[float]]):
    found = measure(scored(*rewards), group_size=4, pass_threshold=1, reward_bounds=(0, 1))
    low, high = found.reward_interval
    assert 0 <= low <= found.reward_mean + 1e-9 and found.reward_mean - 1e-9 <= high <= 1


def test_lost_responses_are_counted_and_break_nothing():
    """TRL#6714: one prompt without answers; of another, one answer's reward failed."""
    found = run_evaluation(ScriptedEngine(silent=["b"]), "a", "b", "c", drop=["c"], group_size=2, pass_threshold=2)
    assert found is not None
    assert (found.num_prompts, found.num_responses, found.num_lost_responses) == (2, 3, 3)
    assert found.reward_mean == pytest.approx((1.5 + 2) / 2)
    assert found.response_tokens_mean == 1.5  # of the four responses generated, scored or not
    assert [(rate.k, rate.num_prompts) for rate in found.pass_rates] == [(1, 2), (2, 1)]


def test_nothing_left_is_no_error():
    found = run_evaluation(ScriptedEngine(silent=["a"]), "a", group_size=2)
    assert found is not None
    assert math.isnan(found.reward_mean)
    assert (found.num_responses, found.num_lost_responses, found.pass_rates) == (0, 2, ())


def test_without_prompts_there_is_no_evaluation():
    assert run_evaluation(ScriptedEngine()) is None


def test_prompts_of_one_id_draw_differently():
    engine = ScriptedEngine()
    run_evaluation(engine, "a", "a")
    assert sorted(str(call[0]) for call in engine.calls) == ["a", "a#2"]


def test_sampling_is_its_own_and_the_rest_the_runs():
    engine = ScriptedEngine()
    run_evaluation(engine, "a", temperature=0.0, top_k=4)
    run_evaluation(engine, "a", max_response_tokens=99, top_p=1.0)
    first, second = (call[2] for call in engine.calls)
    assert first == SamplingParams(temperature=0, top_p=0.9, top_k=4, max_response_tokens=11, seed=5)
    assert second == SamplingParams(temperature=1.0, top_p=1.0, max_response_tokens=99, seed=5)
    assert {call[3] for call in engine.calls} == {0}


@pytest.mark.parametrize(
    ("group_size", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (9, [1, 2, 4, 8, 9])]
)
def test_powers_of_two_and_the_group_size_are_reported(group_size: int, ks: list[int]):
    found = measure(scored([0.0] * group_size), group_size=group_size, pass_threshold=1)
    assert [rate.k for rate in found.pass_rates] == ks


@pytest.mark.parametrize(("reward", "passes"), [(0.1 + 0.2 + 0.7 - 1e-16, 1.0), (1 - 1e-6, 0.0)])
def test_threshold_forgives_rounding_only(reward: float, passes: float):
    assert measure(scored([reward]), group_size=1, pass_threshold=1).pass_rates[0].mean == passes


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(outcomes: list[bool], data: st.DataObject):
    """arXiv:2107.03374, section 2.1. Oracle: every choice of k of the answers."""
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    wanted = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(sum(outcomes), len(outcomes), k) == pytest.approx(wanted, abs=1e-12)


def test_pass_at_k_is_exact_for_large_groups():
    """numpy products and float factorials overflow or cancel here."""
    assert pass_at_k(1, 10_000, 10_000) == 1.0
    assert pass_at_k(1, 10_000, 1) == pytest.approx(1e-4, rel=1e-12)
    assert pass_at_k(0, 10_000, 5_000) == 0.0


def test_single_answers_have_wilsons_interval():
    """As tabulated for 7, 10 and 0 of 10."""
    assert pass_interval([1.0] * 7 + [0.0] * 3, max_draws_per_prompt=1) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert pass_interval([1.0] * 10, max_draws_per_prompt=1) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert pass_interval([0.0] * 10, max_draws_per_prompt=1) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_interval_of_one_prompt_is_wide():
    low, high = pass_interval([0.5], max_draws_per_prompt=8)
    assert high - low > 0.7


@given(rates=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12))
def test_interval_holds_the_mean_and_is_never_empty(rates: list[float]):
    low, high = pass_interval(rates, max_draws_per_prompt=4)
    assert 0 <= low <= np.mean(rates) + 1e-12
    assert np.mean(rates) - 1e-12 <= high <= 1
    assert high - low > 1e-3


@pytest.mark.parametrize(("num_prompts", "N", "k"), [(30, 1, 1), (30, 4, 1), (30, 4, 4), (12, 8, 2)])
@pytest.mark.parametrize("spread", [0.3, 30.0])
def test_intervals_cover_the_truth(num_prompts: int, N: int, k: int, spread: float):
    """Prompts of very different difficulty (spread 0.3) or of nearly equal one: 95 % of evaluations hold the truth.

    Difficulties are Beta(spread, spread); the truth of pass@k is over prompts and answers. 1,000 simulated
    evaluations; at 93 % true coverage fewer than 90 % has a chance below 1e-3.
    """
    rng = np.random.default_rng([num_prompts, N, k, int(10 * spread)])
    truth = 1 - np.mean((1 - rng.beta(spread, spread, 200_000)) ** k)
    hits = 0
    for _ in range(1_000):
        passed_Q = rng.binomial(N, rng.beta(spread, spread, num_prompts))
        rates = [pass_at_k(int(passed), N, k) for passed in passed_Q]
        low, high = pass_interval(rates, max_draws_per_prompt=N / k)
        hits += low <= truth <= high
    assert hits >= 900


def test_greedy_answers_of_one_prompt_are_all_the_same():
    with pytest.raises(ValueError, match="all answers to a prompt are the same"):
        EvaluationConfig(temperature=0, group_size=2)


def test_best_checkpoint_needs_evaluations_to_compare():
    with pytest.raises(ValueError, match=r"evaluation\.every_steps is not set"):
        EvaluationConfig(keep_best=True)


BEST = ("--evaluation.every_steps=1", "--evaluation.keep_best=true", "--evaluation.group_size=3")


@pytest.mark.parametrize("after_scores", [30, pytest.param(75, marks=pytest.mark.full)])
def test_best_checkpoint_is_the_same_after_a_disturbed_run(
    after_scores: int, tmp_path: Path, command: Callable[[list[str]], Outcome]
):
    """Kept though only the newest is; the same step and bytes where the run was stopped and resumed on the way."""
    runs: list[TinyRun] = []
    for name in ("whole", "disturbed"):
        (tmp_path / name).mkdir()
        write_tiny_recipe(tmp_path / name)
        runs.append(TinyRun(tmp_path / name, command))
        runs[-1].edit(("keep_checkpoints = 9", "keep_checkpoints = 1"), ("checkpoint_every_steps = 2", ""))
    whole, disturbed = runs
    assert whole.train(*BEST).status == 0
    disturbed.trigger(after_scores=after_scores, action="terminate")
    assert disturbed.train(*BEST).status == 143
    assert disturbed.train(*BEST).status == 0

    best = best_checkpoint(whole.run_dir)
    rewards = {row["step"]: row["reward_mean"] for row in metrics_rows(whole.run_dir, "evaluate") if row["step"]}
    assert rewards[int(best.name.removeprefix("step-"))] == max(rewards.values())
    weights = [best_checkpoint(run.run_dir) / "model.safetensors" for run in runs]
    assert weights[0].parent.name == weights[1].parent.name
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert traces(whole.run_dir) == traces(disturbed.run_dir)
