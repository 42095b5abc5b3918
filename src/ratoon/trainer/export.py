"""A trained model as a folder that other tools load."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from ratoon.models import align_eos, load_merged
from ratoon.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ratoon.models.base_model import BASE_FILE
from ratoon.models.soundness import describe_spoilt, spoilt_in_folder
from ratoon.trainer.checkpoint import MANIFEST, checkpoint_step, find_damage, latest_checkpoint, model_files
from ratoon.trainer.durable_files import PARTIAL_PREFIX, fsync_folder, fsync_tree
from ratoon.types import UserError

CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """What becomes of the adapters of a LoRA run; nothing to other runs."""

    is_merged: bool = True
    """Into their base, as a model of its own; else they alone are written, as peft does."""

    base_path: str | None = None
    """Where the folder of the base is now; None: where it was in training."""

    trust_remote_code: bool = False
    """Run Python code from the base's folder."""


def export_checkpoint(
    source: Path,
    out_dir: Path,
    *,
    adapters: AdapterExport | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> Path:
    """Writes a checkpoint's model and tokenizer, without the trainer's state, to `out_dir`. Returns the checkpoint.

    source: a run folder, whose newest whole checkpoint is taken, or one checkpoint's folder. `warn` hears of damaged
    checkpoints that are passed over.
    adapters: as `AdapterExport` unless given.
    `AutoModelForCausalLM.from_pretrained(out_dir)` and `AutoTokenizer.from_pretrained(out_dir)` read the result, or
    `PeftModel.from_pretrained(base, out_dir)` where adapters are not merged. The folder appears once it is whole.
    Raises UserError when there is no such checkpoint, `out_dir` holds anything or lies among a run's checkpoints, the
    base of adapters is gone or another, or weights are NaN or infinite; and for wishes about adapters that the
    checkpoint does not have.
    """
    checkpoint = _find_checkpoint(source, warn)
    has_adapters = (checkpoint / BASE_FILE).is_file()
    if adapters is not None and not has_adapters:
        raise UserError(
            f"checkpoint {checkpoint} holds a whole model and no adapters, so there is nothing to merge or to leave "
            "unmerged; export it without --adapter, --base and --trust-remote-code"
        )
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
        adapters = adapters or AdapterExport()
        if has_adapters and adapters.is_merged:
            _merge(partial, checkpoint, adapters)
        _refuse_spoilt(partial, checkpoint)
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


def _merge(folder: Path, checkpoint: Path, adapters: AdapterExport) -> None:
    """Replaces the adapters in `folder`, a copy of the checkpoint's, by an ordinary model."""
    try:
        model = load_merged(folder, base_path=adapters.base_path, trust_remote_code=adapters.trust_remote_code)
    except UserError as error:
        raise UserError(
            f"the adapters of {checkpoint} cannot be merged into their base: {error}. If the base model lies elsewhere "
            "now, name its folder with --base; the adapters alone are exported with --adapter"
        ) from error
    align_eos(model, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE):
        (folder / name).unlink()
    model.save_pretrained(folder)


def _refuse_spoilt(folder: Path, checkpoint: Path) -> None:
    """folder: what is to become the export."""
    names = spoilt_in_folder(folder)
    if names:
        raise UserError(
            f"checkpoint {checkpoint} cannot be exported: its model has {describe_spoilt(names)}; export an older "
            "checkpoint by its folder, or train anew with a lower trainer.learning_rate"
        )


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
