"""A trained model as a folder that other tools load."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from ratoon.trainer.checkpoint import MANIFEST, checkpoint_step, find_damage, latest_checkpoint, model_files
from ratoon.trainer.durable_files import PARTIAL_PREFIX, fsync_folder, fsync_tree
from ratoon.types import UserError

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""


def export_checkpoint(source: Path, out_dir: Path, *, warn: Callable[[str], object] = warnings.warn) -> Path:
    """Copies a checkpoint's model and tokenizer, without the trainer's state, to `out_dir`. Returns the checkpoint.

    source: a run folder, whose newest whole checkpoint is taken, or one checkpoint's folder. `warn` hears of damaged
    checkpoints that are passed over.
    `AutoModelForCausalLM.from_pretrained(out_dir)` and `AutoTokenizer.from_pretrained(out_dir)` read the result. The
    folder appears once it is whole. Raises UserError when there is no such checkpoint, `out_dir` holds anything,
    or it lies among a run's checkpoints.
    """
    checkpoint = _find_checkpoint(source, warn)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists and is not an empty folder; remove it or give another folder to export to")
    target = out_dir.absolute()
    if any(_holds_checkpoints(folder) for folder in target.resolve().parents):
        raise UserError(
            f"{out_dir} is among the checkpoints of a run, which would take it for one of them; "
            "give a folder outside to export to"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(PARTIAL_PREFIX + target.name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in model_files(checkpoint):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, partial / name)
        fsync_tree(partial)
        partial.rename(target)
        fsync_folder(target.parent)
    except FileNotFoundError as error:
        raise UserError(
            f"checkpoint {checkpoint} was removed while it was copied, by the run that goes on writing newer ones; "
            "export again"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoint


def _holds_checkpoints(folder: Path) -> bool:
    is_checkpoint = (folder / MANIFEST).exists()
    return is_checkpoint or (folder.name == CHECKPOINTS and any(folder.glob(f"step-*/{MANIFEST}")))


def _find_checkpoint(source: Path, warn: Callable[[str], object]) -> Path:
    if not source.is_dir():
        raise UserError(f"{source} is not a folder; give a run folder (runs/NAME) or one of its checkpoints")
    if checkpoint_step(source.absolute()) is not None or (source / MANIFEST).exists():
        damage = find_damage(source)
        if damage is not None:
            raise UserError(f"checkpoint {source} is damaged: {damage}; give another, or the run folder for its newest")
        return source
    folder = source if source.name == CHECKPOINTS else source / CHECKPOINTS
    latest = latest_checkpoint(folder, warn=warn)
    if latest is None:
        raise UserError(
            f"{source} holds no finished checkpoint (looked in {folder}); train until the first one is written, "
            "or give another run folder"
        )
    return latest
