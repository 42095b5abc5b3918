"""The model that a KL penalty keeps the policy near: the policy as it was when reinforcement learning began."""

import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ratoon.config.recipe import Recipe
from ratoon.loop.run_folder import RunFolder
from ratoon.models import build_policy
from ratoon.trainer.adapter_reference import adapters_off_reference
from ratoon.trainer.durable_files import PARTIAL_PREFIX, fsync_folder, fsync_tree
from ratoon.trainer.model_folder import save_model
from ratoon.trainer.reference import ReferenceScore, frozen_reference
from ratoon.types.errors import UserError


def keep_reference(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: RunFolder
) -> None:
    """Writes the warm-started policy to `reference/`, where the recipe's reference is none that it names itself.

    Called once, when the warm start is done; a folder of an earlier attempt is replaced.
    """
    if not _is_kept(recipe):
        return
    partial = folder.reference.with_name(PARTIAL_PREFIX + folder.reference.name)
    for old in (partial, folder.reference):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    save_model(model, tokenizer, partial)
    fsync_tree(partial)
    partial.rename(folder.reference)
    fsync_folder(folder.path)


def build_reference(
    recipe: Recipe, policy: PreTrainedModel, folder: RunFolder, *, device: torch.device
) -> ReferenceScore | None:
    """The reference's scores; None where the recipe has no KL penalty.

    With adapters: the policy with its adapters off. Otherwise a second model, frozen: the one that the recipe names, or
    after a warm start the one that `keep_reference` wrote. Raises UserError where that is gone.
    """
    if not recipe.algorithm.needs_reference:
        return None
    temperature = recipe.rollout.temperature
    if recipe.model.lora is not None:
        return adapters_off_reference(policy, temperature)
    checkpoint: Path | None = None
    if _is_kept(recipe):
        checkpoint = folder.reference
        if not checkpoint.is_dir():
            raise UserError(
                f"{folder.shown(checkpoint)} is gone, the warm-started model that algorithm.kl_coefficient measures "
                "the policy against; put it back, or start anew with --fresh (the old run is set aside)"
            )
    config = recipe.model.model_copy(update={"recompute": "none"})
    return frozen_reference(
        build_policy(config, seed=recipe.run.seed, device=device, checkpoint=checkpoint), temperature
    )


def _is_kept(recipe: Recipe) -> bool:
    return recipe.algorithm.needs_reference and recipe.model.lora is None and recipe.sft is not None
