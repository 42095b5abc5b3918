"""One evaluation of one model, outside any run."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ratoon.config.recipe import Recipe
from ratoon.data import load_prompts
from ratoon.loop.evaluation import Answers, Evaluation, answer, measure
from ratoon.loop.inputs import (
    check_attention,
    check_cache_room,
    check_rollout,
    load_model,
    max_answer_tokens,
    resolve_device,
)
from ratoon.models import check_vocabulary, fresh_tokenizer, load_tokenizer, preview_model
from ratoon.models.config import ModelConfig
from ratoon.rewards import RewardPool
from ratoon.rollout import RolloutEngine, build_engine, check_model
from ratoon.types.errors import UserError, first_cause
from ratoon.types.rollouts import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTask:
    """What is evaluated, and on what."""

    recipe: Recipe
    """Its model, data, reward, rollout and evaluation tables count; and `run.seed`, `trainer.device`."""

    base_dir: Path
    """Files that the recipe names are relative to it."""

    checkpoint: Path | None
    """Whose weights and tokenizer are taken; None: those that the model table names."""

    heldout_only: bool
    """Only the prompts that a run of this recipe holds out; else all of the data."""

    max_prompts: int | None
    """The first so many prompts; None: all."""


def evaluate_model(
    task: EvaluationTask, *, warn: Callable[[str], object]
) -> tuple[Evaluation, tuple[RolloutGroup, ...]]:
    """The figures, and the scored responses they come from.

    It draws what the run's own evaluations draw, for the same prompts and settings. Raises UserError for what the user
    must change, before the model loads wherever that can be known.
    """
    disable_progress_bar()
    recipe = task.recipe
    device = resolve_device(recipe.trainer.device)
    check_attention(recipe.model.attention)
    check_rollout(recipe, is_evaluated=True)
    tokenizer = _tokenizer(recipe, task.checkpoint)
    if task.checkpoint is None:  # a run's was checked when the run began
        shape = preview_model(recipe.model).shape
        check_model(recipe.rollout, shape)
        check_vocabulary(tokenizer, shape.vocab_size)
    split = load_prompts(recipe.data, tokenizer, base_dir=task.base_dir)
    for line in split.report.warnings:
        warn(line)
    prompts = (split.heldout if task.heldout_only else (*split.train, *split.heldout))[: task.max_prompts]
    most_tokens = max_answer_tokens(recipe)
    if recipe.rollout.cache_tokens is not None:
        shape = preview_model(_model_config(recipe, task.checkpoint)).shape
        check_cache_room(recipe, shape, prompts, most_tokens, device.type)
    with RewardPool(recipe.reward, base_dir=task.base_dir, max_response_tokens=most_tokens) as rewards:
        rewards.show_output(None)
        rewards.check(prompts, split.columns)
        model = load_model(recipe, tokenizer, checkpoint=task.checkpoint, device=device)
        engine = build_engine(recipe.rollout, model, tokenizer, device)
        answers = _unwrapped(lambda: asyncio.run(_answer(engine, prompts, recipe, rewards, warn)))
    config = recipe.evaluation
    found = measure(
        answers,
        group_size=config.group_size,
        pass_threshold=config.pass_threshold,
        reward_bounds=recipe.reward.bounds,
    )
    return found, answers.scored


def _model_config(recipe: Recipe, checkpoint: Path | None) -> ModelConfig:
    """As the recipe has it, but in the checkpoint's folder where that holds a whole model."""
    if checkpoint is None or recipe.model.lora is not None:
        return recipe.model
    return recipe.model.model_copy(update={"path": str(checkpoint), "fresh": None, "gguf_file": None})


def _tokenizer(recipe: Recipe, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """The checkpoint's own; where it holds adapters only, the base model's."""
    config = recipe.model
    has_own = checkpoint is not None and config.lora is None
    if not has_own and config.fresh is not None:
        return fresh_tokenizer(config.fresh)
    path = checkpoint if has_own else config.path
    assert path is not None, "a model config has a path or is fresh"
    return load_tokenizer(
        str(path),
        gguf_file=None if has_own else config.gguf_file,
        eos_token=config.eos_token,
        trust_remote_code=config.trust_remote_code,
    )


async def _answer(
    engine: RolloutEngine, prompts: Sequence[Prompt], recipe: Recipe, rewards: RewardPool, warn: Callable[[str], object]
) -> Answers:
    async def score(groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        scored = await rewards.score(groups)
        for sentence in scored.warnings().values():
            warn(sentence)
        return scored.groups

    try:
        return await answer(
            engine,
            prompts,
            group_size=recipe.evaluation.group_size,
            sampling=recipe.evaluation.sampling_params(recipe.rollout.sampling_params(recipe.run.seed)),
            score=score,
        )
    finally:
        await engine.close()


def _unwrapped(run: Callable[[], Answers]) -> Answers:
    """Raises the first error of tasks that fail as a group."""
    try:
        return run()
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        if isinstance(cause, UserError):
            raise cause from None
        raise cause from group
