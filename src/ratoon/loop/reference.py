"""The model that a KL penalty keeps the policy near: the policy as it was when reinforcement learning began."""

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.config.recipe import Recipe
from ratoon.loop.run_folder import RunFolder
from ratoon.models import build_policy, sequence_group_of, set_sequence_parallel
from ratoon.models.base_model import fingerprint_of
from ratoon.models.sharding import shard_policy
from ratoon.trainer.adapter_reference import adapters_off_reference, saved_adapters_reference
from ratoon.trainer.checkpoint import find_damage, write_manifest
from ratoon.trainer.durable_files import PARTIAL_PREFIX, fsync_folder, fsync_tree, replace_file
from ratoon.trainer.model_folder import save_model
from ratoon.trainer.reference import ReferenceScore, frozen_reference
from ratoon.types.errors import UserError


def keep_reference(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: RunFolder
) -> None:
    """What a resumed run needs to have the same reference, called once before the first step.

    Writes the warm-started policy to `reference/`; without a warm start, a fingerprint of the model that the recipe
    names. What an earlier attempt wrote is replaced.
    """
    if not _is_kept(recipe):
        if _is_named(recipe):
            digest = fingerprint_of(model) + "\n"
            replace_file(folder.reference_fingerprint, lambda partial: partial.write_text(digest, encoding="utf-8"))
        return
    partial = folder.reference.with_name(PARTIAL_PREFIX + folder.reference.name)
    for old in (partial, folder.reference):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    save_model(model, tokenizer, partial)
    write_manifest(partial, step=0)
    fsync_tree(partial)
    partial.rename(folder.reference)
    fsync_folder(folder.path)


def build_reference(
    recipe: Recipe, policy: PreTrainedModel, folder: RunFolder, *, device: torch.device, is_sharded: bool = False
) -> ReferenceScore | None:
    """The reference's scores; None where the recipe has no KL penalty.

    With adapters: the policy with its adapters off, or after a warm start with those that `keep_reference` wrote.
    Otherwise a second model, frozen: the one that the recipe names, or after a warm start the one that `keep_reference`
    wrote. is_sharded: it is cut over the ranks, as the policy is. Ranks that hold the policy's microbatches together
    score them under the reference together, too.

    Raises UserError where that model is gone or damaged.
    """
    if not recipe.algorithm.needs_reference:
        return None
    temperature = recipe.rollout.temperature
    checkpoint = _kept_reference(folder) if _is_kept(recipe) else None
    if recipe.model.lora is not None:
        if checkpoint is None:
            return adapters_off_reference(policy, temperature)
        return saved_adapters_reference(policy, checkpoint, temperature)
    config = recipe.model.model_copy(update={"recompute": "none"})
    model = build_policy(config, seed=recipe.run.seed, device=device, checkpoint=checkpoint)
    if _is_named(recipe):
        _check_fingerprint(recipe, model, folder)
    if is_sharded:
        shard_policy(model.requires_grad_(False))
    return frozen_reference(set_sequence_parallel(model, sequence_group_of(policy)), temperature)


def _kept_reference(folder: RunFolder) -> Path:
    """Verified byte by byte: a reference that changed between two commands would change what is trained unseen."""
    path = folder.reference
    damage = find_damage(path) if path.is_dir() else "it is gone"
    if damage is not None:
        raise UserError(
            f"{folder.shown(path)}, the warm-started model that algorithm.kl_coefficient measures the policy against, "
            f"is not as it was written: {damage}; put it back, or start anew with --fresh (the old run is set aside)"
        )
    return path


def _check_fingerprint(recipe: Recipe, model: PreTrainedModel, folder: RunFolder) -> None:
    path = folder.reference_fingerprint
    if not path.is_file() or path.read_text(errors="replace").strip() != fingerprint_of(model):
        what = "its fingerprint" if not path.is_file() else repr(recipe.model.path or "a fresh model")
        raise UserError(
            f"algorithm.kl_coefficient measures the policy against the model that run {recipe.run.name} began with, "
            f"and {what} is not as it was then ({folder.shown(path)}); put it back, or start anew with --fresh (the "
            "old run is set aside)"
        )


def _is_named(recipe: Recipe) -> bool:
    """The recipe's own model, loaded a second time; adapters know their base by themselves."""
    return recipe.algorithm.needs_reference and recipe.sft is None and recipe.model.lora is None


def _is_kept(recipe: Recipe) -> bool:
    return recipe.algorithm.needs_reference and recipe.sft is not None
