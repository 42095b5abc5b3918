"""Checkpoints that are complete or absent: `checkpoints/step-000010/`.

The folder itself is a Hugging Face model folder. Beside the model's files it holds `trainer_state/` (optimizer, random
generators, position in the data) and `manifest.json`, which lists every file with its size and SHA-256. It is written
under another name and renamed once everything is on disk, so a folder of the final name is whole unless someone
damaged it afterwards, which the manifest shows.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ratoon.trainer.durable_files import PARTIAL_PREFIX, fsync_folder, fsync_tree, is_disk_full
from ratoon.trainer.state_tree import join_state, split_state, state_bytes
from ratoon.types import UserError

MANIFEST = "manifest.json"
STATE_FOLDER = "trainer_state"
FORMAT_VERSION = 1
FREE_BYTES_MARGIN = 64 * 1024 * 1024
"""Left free beside a checkpoint's own bytes, for the log and the rollouts of the next steps."""

_TENSORS, _SKELETON, _POSITION = "tensors.safetensors", "state.json", "position.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run needs to go on, model weights apart: those are read from `path` like any model folder."""

    path: Path
    step: int
    state: Any
    """The nested state as it was given to `save_checkpoint`, tensors on the CPU."""

    position: Mapping[str, Any]


def checkpoint_name(step: int) -> str:
    """`step-000010` for step 10."""
    return f"step-{step:06d}"


def checkpoint_step(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model_writer: Callable[[Path], None],
    model_bytes: int,
    state: Any,
    position: Mapping[str, Any],
    keep_last: int = 2,
    keep_steps: Collection[int] = (),
) -> Path:
    """Writes `folder/step-NNNNNN`, removes the oldest ones, and returns its path once it is on disk.

    model_writer: fills the folder it is given with a Hugging Face model (see `save_model`).
    model_bytes: bytes it will write (see `model_file_bytes`), so that a full disk is seen before writing.
    state: nested dicts, lists and tuples of tensors and plain values (`state_tree`): optimizer, generators, counters.
    position: plain JSON: where the run stands in the data.
    keep_last: complete checkpoints that stay, this one included.
    keep_steps: steps whose complete checkpoints stay besides.

    Call it on one rank. A whole checkpoint of this step that is there already stays, a damaged one is replaced.
    Raises UserError when the disk is too small, and whatever else goes wrong as it is; in each case the earlier
    checkpoints are untouched.
    """
    if keep_last < 1:
        raise ValueError(f"trainer.keep_checkpoints must be at least 1, got {keep_last}")
    num_bytes = model_bytes + state_bytes(state)
    partial = begin_checkpoint(folder, step, num_bytes=num_bytes)
    final = folder / checkpoint_name(step)
    if partial is None:
        return final
    try:
        with naming_full_disk(partial, num_bytes):
            model_writer(partial)
            write_state(partial / STATE_FOLDER, state, position)
            complete_checkpoint(partial, step)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    remove_old_checkpoints(folder, newest=final, keep_last=keep_last, keep_steps=keep_steps)
    return final


def begin_checkpoint(folder: Path, step: int, *, num_bytes: int) -> Path | None:
    """An empty folder for what is to become the checkpoint of `step`; None where a whole one is there.

    Raises UserError where the disk has no room for `num_bytes`.
    """
    assert step >= 0, f"a step is counted from 0, got {step}"
    folder.mkdir(parents=True, exist_ok=True)
    clean_leftovers(folder)
    final = folder / checkpoint_name(step)
    if final.exists():
        if find_damage(final) is None:
            return None
        _remove(final)
    require_free_bytes(folder, num_bytes)
    partial = folder / (PARTIAL_PREFIX + checkpoint_name(step))
    partial.mkdir()
    return partial


def complete_checkpoint(partial: Path, step: int) -> None:
    """Gives what `begin_checkpoint` made, and others have filled, its final name, once everything is on disk."""
    write_manifest(partial, step)
    fsync_tree(partial)
    partial.rename(partial.with_name(checkpoint_name(step)))
    fsync_folder(partial.parent)


@contextmanager
def naming_full_disk(partial: Path, num_bytes: int) -> Iterator[None]:
    """Around the writing of a checkpoint of about `num_bytes`: UserError where the disk fills up."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise UserError(
                f"the disk filled up while checkpoint {partial.name.removeprefix(PARTIAL_PREFIX)} was written to "
                f"{partial.parent} (it needs about {num_bytes / 1e9:.2f} GB): {error}; earlier checkpoints are whole. "
                "Free some space and run the same command again"
            ) from error
        raise


def latest_checkpoint(folder: Path, *, warn: Callable[[str], object] = warnings.warn) -> Path | None:
    """The newest checkpoint whose every byte is as it was written; None if none was ever completed.

    `warn` hears of each damaged one that is passed over. Raises UserError when all are damaged: going on from nothing
    would throw the run away unasked.
    """
    candidates = _by_step(folder)
    damages: list[str] = []
    for path in reversed(candidates):
        damage = find_damage(path)
        if damage is None:
            return path
        damages.append(damage)
        warn(f"checkpoint {path} is damaged and was passed over: {damage}")
    if damages:
        raise UserError(
            f"every checkpoint in {folder} is damaged, the newest of {len(damages)} thus: {damages[0]}; "
            "put back a whole copy, or start anew with --fresh"
        )
    return None


def load_checkpoint(path: Path, *, read_bytes: bool = True) -> Checkpoint:
    """Reads the state of one checkpoint, verified byte by byte. Raises UserError naming what is missing or damaged.

    read_bytes: False where another rank reads and compares all of it.
    """
    damage = find_damage(path, read_bytes=read_bytes)
    if damage is not None:
        raise UserError(f"{path} is not a whole checkpoint: {damage}")
    state_folder = path / STATE_FOLDER
    with safe_open(state_folder / _TENSORS, framework="pt", device="cpu") as file:
        # Copies: the file may be removed while the run still uses its tensors.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    skeleton = json.loads((state_folder / _SKELETON).read_text(encoding="utf-8"))
    position = json.loads((state_folder / _POSITION).read_text(encoding="utf-8"))
    step = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["step"]
    return Checkpoint(path=path, step=step, state=join_state(skeleton, tensors), position=position)


def find_damage(path: Path, *, read_bytes: bool = True) -> str | None:
    """What is wrong with a checkpoint, as a sentence; None if it is whole.

    read_bytes: compare contents too, not only which files there are and how long.
    """
    manifest_path = path / MANIFEST
    try:
        if not manifest_path.is_file():  # a pipe would be waited for
            return f"it has no {MANIFEST}"
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        version, step, files, digest = (manifest[key] for key in ("format_version", "step", "files", "digest"))
    except FileNotFoundError:  # removed meanwhile, as the run's old checkpoints are
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} cannot be read"
    if version != FORMAT_VERSION:
        return f"its format is version {version}, and this version of ratoon reads {FORMAT_VERSION}"
    if digest != _manifest_digest(step, files) or checkpoint_step(path) not in (None, step):
        return f"its {MANIFEST} was changed, or is another checkpoint's"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size:,} bytes, not the {entry['bytes']:,} that were written"
        if read_bytes and _sha256(file) != entry["sha256"]:
            return f"{name} has other contents than were written"
    return None


def require_free_bytes(folder: Path, num_bytes: int) -> None:
    """Raises UserError if the disk of `folder`, which is made, has no room for a checkpoint of `num_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    wanted_bytes = num_bytes + FREE_BYTES_MARGIN
    if free_bytes < wanted_bytes:
        raise UserError(
            f"a checkpoint in {folder} needs {wanted_bytes / 1e9:.2f} GB, and the disk has {free_bytes / 1e9:.2f} GB "
            "free; nothing was written and earlier checkpoints are whole. Free some space, keep fewer checkpoints, "
            "or move the run to a larger disk, then run the same command again"
        )


def clean_leftovers(folder: Path) -> None:
    """Removes what killed processes left half written or half removed; complete checkpoints are untouched.

    Only for the process that writes to `folder`: another one's half-written checkpoint would go too.
    """
    for path in folder.glob(PARTIAL_PREFIX + "*"):
        shutil.rmtree(path, ignore_errors=True)


def model_files(path: Path) -> list[Path]:
    """Files of a whole checkpoint that make up the Hugging Face model folder, relative to it."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return [Path(name) for name in manifest["files"] if Path(name).parts[0] != STATE_FOLDER]


def _by_step(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(steps)]


def write_state(folder: Path, state: Any, position: Mapping[str, Any]) -> None:
    """The part of a checkpoint that is not the model; `folder` may hold files of others."""
    folder.mkdir(exist_ok=True)
    skeleton, tensors = split_state(state)
    save_file(tensors, folder / _TENSORS)
    for name, content in ((_SKELETON, skeleton), (_POSITION, dict(position))):
        (folder / name).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")


def write_manifest(folder: Path, step: int) -> None:
    """Lists what the folder holds, for `find_damage` to compare."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "files": files,
        "digest": _manifest_digest(step, files),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _manifest_digest(step: int, files: Any) -> str:
    """Shows a changed manifest for what it is, instead of accusing the files it lists."""
    return hashlib.sha256(json.dumps([step, files], sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_old_checkpoints(folder: Path, *, newest: Path, keep_last: int, keep_steps: Collection[int]) -> None:
    """Removes older checkpoints but for the last `keep_last` complete ones and complete ones of `keep_steps`."""
    by_step = _by_step(folder)
    older = by_step[: by_step.index(newest)]
    complete = [path for path in older if find_damage(path, read_bytes=False) is None]
    kept = complete[max(len(complete) - (keep_last - 1), 0) :]
    kept += [path for path in complete if checkpoint_step(path) in keep_steps]
    for path in older:
        if path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    # Renamed first: a process killed in between leaves a leftover, not a damaged checkpoint.
    doomed = path.with_name(PARTIAL_PREFIX + "removed-" + path.name)
    path.rename(doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()
