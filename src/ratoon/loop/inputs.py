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
from ratoon.models import align_eos, attach, build_fresh, load_policy, load_tokenizer, set_recompute
from ratoon.models.config import AttentionImpl
from ratoon.models.load import DTYPES
from ratoon.rewards import build_reward_fn, check_prompts
from ratoon.types.errors import UserError
from ratoon.types.protocols import RewardFn
from ratoon.types.rollouts import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Data, tokenizer and reward, read and checked."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSplit
    reward_fn: RewardFn
    demonstrations: Mapping[str | int, str]
    """By prompt id, what the supervised warm start imitates; empty without that stage."""

    user_files: Mapping[str, str]
    """By the recipe's key, the SHA-256 of the Python file it names."""

    @property
    def eos_token_id(self) -> int:
        eos_token_id = self.tokenizer.eos_token_id
        assert isinstance(eos_token_id, int), f"a loaded tokenizer has one EOS token, got {eos_token_id!r}"
        return eos_token_id

    def supervised(self, prompts: Sequence[Prompt]) -> tuple[RolloutGroup, ...]:
        """Groups of one response: each prompt's demonstration."""
        return supervised_examples(
            prompts,
            self.tokenizer,
            eos_token_id=self.eos_token_id,
            demonstrations=[self.demonstrations[prompt.id] for prompt in prompts],
        )


def load_inputs(recipe: Recipe, recipe_dir: Path) -> Inputs:
    """Reads tokenizer, prompts and reward function. Files the recipe names are relative to `recipe_dir`.

    Raises UserError for whatever is wrong in them, and for prompts that the limits leave no room for.
    """
    tokenizer = _load_tokenizer(recipe)
    prompts = load_prompts(recipe.data, tokenizer, base_dir=recipe_dir)
    reward_fn = build_reward_fn(recipe.reward, base_dir=recipe_dir, columns=prompts.columns)
    _check_room(recipe, prompts)
    check_prompts(recipe.reward, (*prompts.train, *prompts.heldout))
    texts: tuple[str, ...] = ()
    if recipe.sft is not None:
        texts = demonstrations_of(recipe.sft.demonstrations, prompts.train, base_dir=recipe_dir)
    inputs = Inputs(
        tokenizer=tokenizer,
        prompts=prompts,
        reward_fn=reward_fn,
        demonstrations={prompt.id: text for prompt, text in zip(prompts.train, texts, strict=False)},
        user_files=_user_file_digests(recipe, recipe_dir),
    )
    if recipe.sft is not None:  # every text can be written, or the warm start would fail midway
        inputs.supervised(prompts.train)
    return inputs


def load_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, checkpoint: Path | None, device: torch.device
) -> PreTrainedModel:
    """The policy, attached, on `device`: from `checkpoint` if there is one, else as the recipe says."""
    config = recipe.model
    if checkpoint is None and config.fresh is not None:
        model, _ = build_fresh(config.fresh, recipe.run.seed)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device, DTYPES[config.dtype])
        set_recompute(attach(model, config.attention), config.recompute)
    else:
        path = checkpoint if checkpoint is not None else config.path
        assert path is not None, "a model config has a path or is fresh"
        model = load_policy(
            path,
            dtype=config.dtype,
            device=device,
            impl=config.attention,
            recompute=config.recompute,
            gguf_file=None if checkpoint is not None else config.gguf_file,
            rope_positions=config.rope_positions,
            trust_remote_code=config.trust_remote_code,
        )
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


def check_attention(impl: AttentionImpl) -> None:
    """Raises UserError if no provider of `impl` works here. Whether it fits the model, attaching it shows."""
    found = available_impls()
    if impl == "auto" or any(status.impl == impl and status.is_available for status in found):
        return
    reasons = "; ".join(status.reason for status in found if status.impl == impl) or "there is no such implementation"
    usable = sorted({status.impl for status in found if status.is_available})
    raise UserError(
        f'model.attention = "{impl}" cannot run here: {reasons}. Allowed here: "auto", '
        + ", ".join(f'"{name}"' for name in usable)
    )


def _load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    config = recipe.model
    if config.fresh is not None:
        return build_fresh(config.fresh, recipe.run.seed)[1]
    assert config.path is not None, "a model config has a path or is fresh"
    return load_tokenizer(
        config.path,
        gguf_file=config.gguf_file,
        eos_token=config.eos_token,
        trust_remote_code=config.trust_remote_code,
    )


def _user_file_digests(recipe: Recipe, recipe_dir: Path) -> dict[str, str]:
    sources = {"reward.function": recipe.reward.function}
    if recipe.sft is not None and recipe.sft.demonstrations is not None:
        sources["sft.demonstrations"] = recipe.sft.demonstrations
    targets = {key: python_target(source) for key, source in sources.items()}
    return {
        key: hashlib.sha256((recipe_dir / Path(target[0]).expanduser()).read_bytes()).hexdigest()
        for key, target in targets.items()
        if target is not None
    }


def _check_room(recipe: Recipe, prompts: PromptSplit) -> None:
    """A prompt and its longest possible response must fit a microbatch, and a fresh model's positions."""
    longest = max((*prompts.train, *prompts.heldout), key=lambda prompt: prompt.num_tokens)
    wanted = longest.num_tokens + recipe.rollout.max_response_tokens
    limits = {"planner.max_rows_per_microbatch": recipe.planner.max_rows_per_microbatch}
    if recipe.model.fresh is not None:
        limits["model.fresh.max_positions"] = recipe.model.fresh.max_positions
    for key, limit in limits.items():
        if wanted > limit:
            raise UserError(
                f"{longest.id}: a prompt of {longest.num_tokens:,} tokens and a response of up to "
                f"{recipe.rollout.max_response_tokens:,} (rollout.max_response_tokens) need {wanted:,}, over "
                f"{key} = {limit:,}; raise that limit, shorten responses, or set data.max_prompt_tokens"
            )
