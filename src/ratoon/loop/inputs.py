"""Everything a recipe names that can be refused before a model loads, and then the model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.attention import available_impls
from ratoon.config.recipe import Recipe
from ratoon.data import PromptSplit, load_prompts, supervised_examples
from ratoon.data.user_function import python_target
from ratoon.loop.demonstrations import demonstrations_of
from ratoon.loop.run_memory import engine_of
from ratoon.models import (
    align_eos,
    build_policy,
    check_token_ids,
    check_vocabulary,
    fresh_tokenizer,
    load_tokenizer,
    preview_model,
)
from ratoon.models.config import AttentionImpl
from ratoon.models.invariant import check_machine
from ratoon.models.soundness import SpoiltModelError, describe_spoilt, spoilt_weights
from ratoon.rewards import RewardPool
from ratoon.rollout import check_cache, check_engine, check_model
from ratoon.rollout.model_checks import check_batch_invariant
from ratoon.types.errors import UserError
from ratoon.types.model_shape import ModelShape
from ratoon.types.rollouts import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Data, tokenizer and reward, read and checked."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSplit
    rewards: RewardPool | None
    """None in a process that does not score."""

    demonstrations: Mapping[str | int, str]
    """By prompt id, what the supervised warm start imitates; empty without that stage."""

    user_files: Mapping[str, str]
    """By the recipe's key, the SHA-256 of the Python file it names."""

    def __enter__(self) -> "Inputs":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.rewards is not None:
            self.rewards.close()

    @property
    def eos_token_id(self) -> int:
        eos_token_id = self.tokenizer.eos_token_id
        assert isinstance(eos_token_id, int), f"a loaded tokenizer has one EOS token, got {eos_token_id!r}"
        return eos_token_id

    def changed_files(self, step: int, digests: Mapping[str, str]) -> list[str]:
        """A sentence on each Python file that is another than at the checkpoint of `step`, which has `digests`."""
        return [
            f"the Python file that {key} names has changed since the checkpoint of step {step}: "
            + (
                "the warm start followed the old one, and is not made again"
                if key.startswith("sft.")
                else "steps from here on follow the new one, those before followed the old one"
            )
            for key, digest in digests.items()
            if self.user_files.get(key, digest) != digest
        ]

    def supervised(self, prompts: Sequence[Prompt]) -> tuple[RolloutGroup, ...]:
        """Groups of one response: each prompt's demonstration."""
        return supervised_examples(
            prompts,
            self.tokenizer,
            eos_token_id=self.eos_token_id,
            demonstrations=[self.demonstrations[prompt.id] for prompt in prompts],
        )


def load_inputs(recipe: Recipe, recipe_dir: Path, *, scores: bool = True, device_type: str | None = None) -> Inputs:
    """Reads tokenizer, prompts and reward functions, whose workers live until the result is closed.

    scores: False leaves the reward functions out. device_type: that the recipe is for, where it may not be here.
    Files the recipe names are relative to `recipe_dir`. Raises UserError for whatever is wrong in them, and for prompts
    that the limits leave no room for.
    """
    # First, so that the workers start while the data is read.
    rewards = _reward_pool(recipe, recipe_dir) if scores else None
    try:
        preview = preview_model(recipe.model)  # before its tokenizer, which would take the blame for a bad config.json
        check_model(recipe.rollout, preview.shape)
        tokenizer = load_recipe_tokenizer(recipe)
        check_vocabulary(tokenizer, preview.shape.vocab_size)
        prompts = load_prompts(recipe.data, tokenizer, base_dir=recipe_dir)
        check_token_ids((*prompts.train, *prompts.heldout), preview.shape.vocab_size)
        _check_room(recipe, prompts)
        device_type = device_type or resolve_device(recipe.trainer.device).type
        check_cache_room(recipe, preview.shape, prompts.train, recipe.rollout.max_response_tokens, device_type)
        check_cache_room(recipe, preview.shape, prompts.heldout, max_answer_tokens(recipe), device_type)
        if rewards is not None:
            rewards.check((*prompts.train, *prompts.heldout), prompts.columns)
        texts: tuple[str, ...] = ()
        if recipe.sft is not None:
            texts = demonstrations_of(recipe.sft.demonstrations, prompts.train, base_dir=recipe_dir)
        inputs = Inputs(
            tokenizer=tokenizer,
            prompts=prompts,
            rewards=rewards,
            demonstrations={prompt.id: text for prompt, text in zip(prompts.train, texts, strict=False)},
            user_files=_user_file_digests(recipe, recipe_dir),
        )
        if recipe.sft is not None:  # every text can be written, or the warm start would fail midway
            inputs.supervised(prompts.train)
    except BaseException:
        if rewards is not None:
            rewards.close()
        raise
    return inputs


def _reward_pool(recipe: Recipe, recipe_dir: Path) -> RewardPool:
    return RewardPool(recipe.reward, base_dir=recipe_dir, max_response_tokens=recipe.rollout.max_response_tokens)


def load_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, checkpoint: Path | None, device: torch.device
) -> PreTrainedModel:
    """The policy, attached, on `device`: from `checkpoint` if there is one, else as the recipe says.

    Raises UserError for a checkpoint of a policy that was spoilt, which versions before this one saved.
    """
    try:
        model = build_policy(recipe.model, seed=recipe.run.seed, device=device, checkpoint=checkpoint)
        if checkpoint is not None and recipe.model.lora is not None:  # loaded after the base was checked
            spoilt = spoilt_weights(model.named_parameters())
            if spoilt:
                raise SpoiltModelError(f"it has {describe_spoilt(spoilt)}")
    except SpoiltModelError as error:
        if checkpoint is None:
            raise
        raise UserError(
            f"checkpoint {checkpoint} holds a spoilt policy: {error}. Remove that folder to go on from the checkpoint "
            "before it, or start anew with --fresh and a lower trainer.learning_rate"
        ) from error
    align_eos(model, tokenizer)
    return model


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device of this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'trainer.device = "cuda", but torch finds no CUDA device here; set it to "cpu" or "auto", '
            "or look at what `ratoon doctor` says"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def max_answer_tokens(recipe: Recipe) -> int:
    """Of one answer in an evaluation."""
    return recipe.evaluation.max_response_tokens or recipe.rollout.max_response_tokens


def check_attention(impl: AttentionImpl) -> None:
    """Raises UserError if no provider of `impl` works here. Whether it fits the model, attaching it shows."""
    found = available_impls()
    named = [status for status in found if impl in (status.impl, status.name)]
    if impl == "auto" or any(status.is_available for status in named):
        return
    reasons = "; ".join(f"{status.name}: {status.reason}" for status in named) or "there is no such implementation"
    usable = dict.fromkeys(name for status in found if status.is_available for name in (status.impl, status.name))
    raise UserError(
        f'model.attention = "{impl}" cannot run here: {reasons}. Allowed here: "auto", '
        + ", ".join(f'"{name}"' for name in usable)
    )


def check_rollout(recipe: Recipe, *, is_evaluated: bool, has_device: bool = True) -> None:
    """Raises UserError where the recipe's rollout engine cannot work here, or not as the recipe has it.

    is_evaluated: it also draws the answers of evaluations. has_device: False where the recipe is for a GPU of another
    machine.
    """
    if recipe.model.batch_invariant:
        if has_device:
            check_machine(resolve_device(recipe.trainer.device))
        check_batch_invariant(recipe.rollout)
        if recipe.trainer.sequence_parallel > 1:
            raise UserError(
                f"trainer.sequence_parallel = {recipe.trainer.sequence_parallel} does not go with "
                "model.batch_invariant, which attends for all of a layout's rows on one rank; leave one of them out"
            )
    training = recipe.rollout.sampling_params(recipe.run.seed)
    check_engine(recipe.rollout, *([recipe.evaluation.sampling_params(training)] if is_evaluated else []))


def load_recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    config = recipe.model
    if config.fresh is not None:
        return fresh_tokenizer(config.fresh)
    assert config.path is not None, "a model config has a path or is fresh"
    return load_tokenizer(
        config.path,
        gguf_file=config.gguf_file,
        eos_token=config.eos_token,
        trust_remote_code=config.trust_remote_code,
    )


def _user_file_digests(recipe: Recipe, recipe_dir: Path) -> dict[str, str]:
    files = dict(recipe.reward.python_files)
    sources = {f"{source.key}.filter": source.filter for source in recipe.data.each_source()}
    if recipe.sft is not None:
        sources["sft.demonstrations"] = recipe.sft.demonstrations
    for key, source in sources.items():
        target = None if source is None else python_target(source)
        if target is not None:
            files[key] = target[0]
    return {
        key: hashlib.sha256((recipe_dir / Path(file).expanduser()).read_bytes()).hexdigest()
        for key, file in files.items()
    }


def _check_room(recipe: Recipe, prompts: PromptSplit) -> None:
    """A prompt and its longest possible response must fit a microbatch, and a fresh model's positions."""
    key, most = "rollout.max_response_tokens", recipe.rollout.max_response_tokens
    everyone = (*prompts.train, *prompts.heldout)
    _check_fits(everyone, key, most, "planner.max_rows_per_microbatch", recipe.planner.max_rows_per_microbatch)
    if recipe.model.fresh is None:
        return
    limit = ("model.fresh.max_positions", recipe.model.fresh.max_positions)
    _check_fits(everyone, key, most, *limit)
    if recipe.evaluation.max_response_tokens is not None:
        _check_fits(prompts.heldout, "evaluation.max_response_tokens", recipe.evaluation.max_response_tokens, *limit)


def check_cache_room(
    recipe: Recipe, shape: ModelShape, prompts: Sequence[Prompt], most_tokens: int, device_type: str
) -> None:
    """Raises UserError where `rollout.cache_tokens` cannot hold the longest prompt with a response of `most_tokens`."""
    if recipe.rollout.cache_tokens is None or (longest := _longest(prompts)) is None:
        return
    check_cache(
        recipe.rollout.cache_tokens,
        engine_of(recipe, device_type),
        shape,
        longest,
        most_tokens,
        by_kernels=device_type == "cuda" or recipe.model.batch_invariant,
    )


def _check_fits(prompts: Sequence[Prompt], key: str, most_tokens: int, limit_key: str, limit: int) -> None:
    longest = _longest(prompts)
    if longest is not None and (wanted := longest.num_tokens + most_tokens) > limit:
        raise UserError(
            f"{longest.id}: a prompt of {longest.num_tokens:,} tokens and a response of up to {most_tokens:,} ({key}) "
            f"need {wanted:,}, over {limit_key} = {limit:,}; raise that limit, shorten responses, or set "
            "data.max_prompt_tokens"
        )


def _longest(prompts: Sequence[Prompt]) -> Prompt | None:
    return max(prompts, key=lambda prompt: prompt.num_tokens, default=None)
