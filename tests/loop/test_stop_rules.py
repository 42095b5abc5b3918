"""A run ends by rule when, and only when, the last steps meet it; from the log alone."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loop.tiny_run import write_tiny_recipe

from ratoon.config import load_recipe
from ratoon.config.stop import StopConfig
from ratoon.loop.diagnosis import StepFacts
from ratoon.loop.stop_rules import StopReason, StopRules
from ratoon.metrics import MetricsLog, read_metrics
from ratoon.metrics.rows import MetricValue
from ratoon.types import UserError

GOOD: dict[str, MetricValue] = {
    "num_groups": 2,
    "num_responses": 8,
    "num_lost_responses": 0,
    "num_equal_reward_groups": 0,
    "num_zero_advantages": 0,
    "num_truncated": 0,
    "num_repetitive": 0,
    "num_empty": 0,
    "reward_mean": 0.5,
    "num_updates": 1,
    "num_loss_tokens": 40,
    "loss": 0.0,
    "grad_norm": 1.0,
    "learning_rate": 1e-6,
    "entropy_mean": 1.0,
    "kl_old_mean": 0.0,
}
USELESS: dict[str, MetricValue] = {"num_equal_reward_groups": 2, "num_zero_advantages": 8, "grad_norm": 0.0}


def step(**changed: MetricValue) -> StepFacts:
    return StepFacts.of({**GOOD, **changed})


def stopped_after(config: StopConfig, history: list[StepFacts]) -> tuple[int, StopReason] | None:
    """The first step (counted from 1) at which the rules end the run."""
    rules = StopRules(config)
    for num_steps in range(1, len(history) + 1):
        reason = rules.after_step(history[:num_steps])
        if reason is not None:
            return num_steps, reason
    return None


def test_twenty_useless_steps_are_the_default():
    """unsloth#2291, TRL#5697: not a night of steps that learn nothing."""
    history = [step()] + [step(**USELESS)] * 15 + [step(num_responses=0, num_groups=0, num_lost_responses=8)] * 9
    found = stopped_after(StopConfig(), history)
    assert found is not None
    num_steps, reason = found
    assert num_steps == 21
    assert reason.rule == "stop.max_useless_steps"
    assert "the last 20 steps taught nothing (equal rewards in 15, no responses in 5)" in reason.sentence
    assert "no response was left to train on: 8 were lost" in reason.sentence
    assert reason.how_to_go_on.endswith("with another --stop.max_useless_steps, or 0, which turns it off")


def test_one_useful_step_begins_the_count_anew():
    history = ([step(**USELESS)] * 19 + [step()]) * 3
    assert stopped_after(StopConfig(), history) is None


def test_useless_steps_can_be_allowed():
    assert stopped_after(StopConfig(max_useless_steps=0), [step(**USELESS)] * 200) is None


RULES = [
    ("min_entropy", 0.1, {"entropy_mean": 0.05}, {"entropy_mean": 0.1}, "entropy has collapsed"),
    ("max_kl_old", 0.1, {"kl_old_mean": 0.2}, {"kl_old_mean": 0.1}, "kl_old_mean was above 0.1"),
    ("max_kl_ref", 0.1, {"kl_ref_mean": math.inf}, {"kl_ref_mean": 0.1}, "kl_ref_mean was above 0.1"),
    ("max_repetitive_fraction", 0.5, {"num_repetitive": 5}, {"num_repetitive": 4}, "repeated themselves to the end"),
]


@pytest.mark.parametrize(("key", "bound", "beyond", "within", "words"), RULES)
def test_bound_crossed_long_enough_ends_the_run(
    key: str, bound: float, beyond: dict[str, float], within: dict[str, float], words: str
):
    config = StopConfig.model_validate({key: bound, "patience_steps": 3})
    found = stopped_after(config, [step(**beyond)] * 2 + [step(**within)] + [step(**beyond)] * 4)
    assert found is not None
    num_steps, reason = found
    assert (num_steps, reason.rule) == (6, f"stop.{key}")
    assert words in reason.sentence
    assert "the last 3 steps" in reason.sentence


@pytest.mark.parametrize(("key", "bound", "beyond", "within", "words"), RULES)
def test_rules_are_off_unless_set(
    key: str, bound: float, beyond: dict[str, float], within: dict[str, float], words: str
):
    del key, bound, within, words
    assert stopped_after(StopConfig(), [step(**beyond)] * 50) is None


@pytest.mark.parametrize(("key", "bound", "beyond", "within", "words"), RULES)
def test_what_was_not_measured_crosses_no_bound(
    key: str, bound: float, beyond: dict[str, float], within: dict[str, float], words: str
):
    """A step without responses has neither entropy nor share; it also interrupts a series."""
    del within, words
    config = StopConfig.model_validate({key: bound, "patience_steps": 2, "max_useless_steps": 0})
    nothing = step(
        num_responses=0, entropy_mean=float("nan"), kl_old_mean=None, kl_ref_mean=float("nan"), num_repetitive=0
    )
    assert stopped_after(config, [step(**beyond), nothing] * 5) is None


def test_means_over_no_token_are_no_measure():
    """All truncated and masked: the trainer writes an entropy of 0 over 0 tokens, and nothing has collapsed."""
    config = StopConfig(min_entropy=0.1, patience_steps=1)
    assert stopped_after(config, [step(num_loss_tokens=0, num_truncated=8, entropy_mean=0.0)] * 3) is None


def test_one_step_of_patience_is_said_as_one():
    found = stopped_after(StopConfig(min_entropy=0.1, patience_steps=1), [step(entropy_mean=0.0)])
    assert found is not None
    assert "in the last step (" in found[1].sentence


kinds = st.sampled_from(["good", "useless", "collapsed", "far", "lost"])
MADE = {
    "good": step(),
    "useless": step(**USELESS),
    "collapsed": step(entropy_mean=0.01),
    "far": step(kl_old_mean=3.0),
    "lost": step(num_responses=0, num_groups=0, num_zero_advantages=0),
}


@given(names=st.lists(kinds, max_size=25), useless=st.integers(0, 4), patience=st.integers(1, 4))
def test_against_runs_of_equal_steps(names: list[str], useless: int, patience: int):
    """Oracle: lengths of the series that end at each step, counted in plain loops."""
    config = StopConfig(max_useless_steps=useless, min_entropy=0.1, max_kl_old=1.0, patience_steps=patience)
    wanted: int | None = None
    series = {"useless": 0, "collapsed": 0, "far": 0}
    for number, name in enumerate(names, start=1):
        for kind, members in (("useless", ("useless", "lost")), ("collapsed", ("collapsed",)), ("far", ("far",))):
            series[kind] = series[kind] + 1 if name in members else 0
        is_met = (useless > 0 and series["useless"] >= useless) or max(series["collapsed"], series["far"]) >= patience
        if is_met:
            wanted = number
            break
    found = stopped_after(config, [MADE[name] for name in names])
    assert (None if found is None else found[0]) == wanted


@given(names=st.lists(kinds, min_size=1, max_size=25))
def test_last_steps_are_all_that_the_rules_look_at(names: list[str]):
    rules = StopRules(StopConfig(max_useless_steps=3, min_entropy=0.1, max_kl_old=1.0, patience_steps=2))
    history = [MADE[name] for name in names]
    assert rules.after_step(history) == rules.after_step(history[-rules.num_steps_needed :])


def test_log_tells_a_resumed_run_what_the_run_itself_saw(tmp_path: Path):
    """NaN and infinities included, which JSON lacks."""
    rows = [
        {**GOOD, "entropy_mean": float("nan")},
        {**GOOD, "kl_ref_mean": math.inf, "mismatch_mean_abs": None},
        {**GOOD, **USELESS, "entropy_mean": 0.1 + 0.2},
    ]
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        seen = [StepFacts.of(log.log(number, "train", **row).values) for number, row in enumerate(rows, start=1)]
    assert [StepFacts.of(row.values) for row in read_metrics(tmp_path / "metrics.jsonl")] == seen


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_useless_steps", -1), ("min_entropy", -0.1), ("max_kl_ref", 0.0), ("patience_steps", 0),
     ("max_repetitive_fraction", 1.0), ("min_entropy", float("nan"))],
)  # fmt: skip
def test_bounds_that_mean_nothing_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=key):
        StopConfig.model_validate({key: value})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--stop.max_kl_old=0.1"], "stop.max_kl_old cannot act on one update a step"),
        (["--stop.max_kl_ref=0.1"], "stop.max_kl_ref goes by kl_ref_mean"),
        (["--stop.max_repetitive_fraction=0.5"], "a repetition counts from 32 tokens on"),
        (["--evaluation.keep_best=true", "--evaluation.every_steps=1", "--data.num_heldout=0"], "hold prompts out"),
    ],
)
def test_rule_that_cannot_act_is_refused(overrides: list[str], words: str, tmp_path: Path):
    write_tiny_recipe(tmp_path)
    with pytest.raises(UserError, match=words):
        load_recipe(tmp_path / "recipe.toml", overrides)


def test_rules_that_can_act_are_taken(tmp_path: Path):
    write_tiny_recipe(tmp_path)
    recipe = load_recipe(
        tmp_path / "recipe.toml",
        ["--stop.max_kl_old=0.1", "--algorithm.num_minibatches=2", "--stop.max_kl_ref=1", "--stop.min_entropy=0.2",
         "--algorithm.kl_coefficient=0.1", "--stop.max_repetitive_fraction=0.5", "--rollout.max_response_tokens=32"],
    )  # fmt: skip
    assert recipe.stop.max_kl_ref == 1
