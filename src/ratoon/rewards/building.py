"""From settings to a reward function."""

from collections.abc import Collection, Sequence
from pathlib import Path

from ratoon.data.generators import import_reasoning_gym
from ratoon.rewards.config import REASONING_GYM, RewardConfig
from ratoon.rewards.python_function import load_scorer
from ratoon.rewards.scorers import ExactMatch, ReasoningGym, ScoreEach, Scorer
from ratoon.types.protocols import RewardFn
from ratoon.types.rollouts import Prompt


def build_reward_fn(config: RewardConfig, *, base_dir: Path, columns: Collection[str] | None = None) -> RewardFn:
    """The reward function that `config` names; a Python file is relative to `base_dir`, the recipe's folder.

    columns: metadata keys that every prompt has (`PromptSplit.columns`). Given, a Python function that asks for
    anything else is refused here; otherwise at the first prompt.
    Raises UserError when the function cannot be had, before any model is loaded.
    """
    return ScoreEach(
        config.function,
        _scorer(config, base_dir, columns),
        timeout_s=config.timeout_s,
        score_truncated=config.score_truncated,
    )


def _scorer(config: RewardConfig, base_dir: Path, columns: Collection[str] | None) -> Scorer:
    if config.python_target is not None:
        scorer = load_scorer(*config.python_target, base_dir=base_dir)
        if columns is not None:
            scorer.check_columns(columns, "the data")
        return scorer
    if config.function == REASONING_GYM:
        import_reasoning_gym("reward.function")
        return ReasoningGym(config.extract)
    return ExactMatch(config.extract)


def check_prompts(config: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UserError naming the first prompt that the built-in function of `config` could not score."""
    if config.python_target is not None:
        return
    if config.function == REASONING_GYM:
        gym = ReasoningGym(config.extract)
        for prompt in prompts:
            gym.verifier(prompt)
        return
    exact = ExactMatch(config.extract)
    for prompt in prompts:
        exact.reference(prompt)
