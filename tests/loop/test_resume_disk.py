"""Full, read-only and vanishing disks: named, with every checkpoint whole, and the run goes on once that is mended."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.loop.tiny_run import SCORES_PER_STEP, Outcome, TinyRun, metrics_rows, traces, write_tiny_recipe
from tests.sampling import sampled

from ratoon.loop import synchronous
from ratoon.trainer import checkpoint as checkpoint_module
from ratoon.trainer import model_folder
from ratoon.trainer.checkpoint import find_damage


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def on_disk(
    tmp_path: Path, disk: Path, command: Callable[[list[str]], Outcome], monkeypatch: pytest.MonkeyPatch
) -> TinyRun:
    """The tiny run, its folder on the small disk."""
    monkeypatch.setattr(checkpoint_module, "FREE_BYTES_MARGIN", -(10**9))  # as if the space went while writing
    write_tiny_recipe(tmp_path)
    tiny = TinyRun(tmp_path, command)
    tiny.edit((f'output_dir = "{tmp_path}/runs"', f'output_dir = "{disk}"'))
    tiny.run_dir.parent.mkdir()
    tiny.run_dir.symlink_to(disk / "tiny")
    return tiny


def assert_checkpoints_are_whole(run_dir: Path, *names: str) -> None:
    found = sorted((run_dir / "checkpoints").iterdir())
    assert [path.name for path in found] == list(names)
    assert [find_damage(path) for path in found] == [None] * len(names)


CASES = {
    "metrics.jsonl": (3, 0),
    "rollouts": (3, 4096),
    "checkpoint": (4, 61_440),
}
"""By what finds the disk full: the step in whose scoring it fills up, and the bytes that are left."""


@pytest.mark.parametrize("what", sampled(*CASES, keep=2))
def test_disk_that_fills_up_is_named_and_the_run_goes_on_when_there_is_room(
    on_disk: TinyRun, disk: Path, undisturbed: Path, what: str
):
    step, num_bytes_left = CASES[what]
    filler = disk / "filler"
    on_disk.trigger(after_scores=3 + (step - 1) * SCORES_PER_STEP + 3, action=f"fill:{num_bytes_left}:{filler}")
    full = on_disk.train()
    assert full.status == 2, full
    assert full.err.count("\n") == 1
    assert str(disk / "tiny") in full.err
    wanted = "filled up while checkpoint step-000004" if what == "checkpoint" else f"folder {disk / 'tiny'} is full"
    assert wanted in full.err
    assert_checkpoints_are_whole(on_disk.run_dir, "step-000000", "step-000002")
    assert (on_disk.run_dir / "rollouts" / "step-000003.parquet").exists() == (what == "checkpoint")
    again = on_disk.train()  # nobody has made room yet
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert_checkpoints_are_whole(on_disk.run_dir, "step-000000", "step-000002")
    filler.unlink()
    assert on_disk.train().status == 0
    assert traces(on_disk.run_dir) == traces(undisturbed)


def test_disk_that_is_full_from_the_start_is_named(on_disk: TinyRun, disk: Path, undisturbed: Path):
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    refused = on_disk.train()
    assert refused.status == 2
    assert f"run folder {disk / 'tiny'} cannot be written (No space left on device" in refused.err
    (disk / "filler").unlink()
    assert on_disk.train().status == 0
    assert traces(on_disk.run_dir) == traces(undisturbed)


def test_read_only_folder_is_named(on_disk: TinyRun, disk: Path):
    assert on_disk.train("--trainer.num_steps=1").status == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    refused = on_disk.train()
    assert refused.status == 2
    assert f"run folder {disk / 'tiny'} cannot be written (Read-only file system" in refused.err
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert on_disk.train("--trainer.num_steps=2").status == 0


@pytest.mark.parametrize("code", sampled(errno.EROFS, errno.EIO, errno.ESTALE))
def test_disk_that_fails_in_a_step_ends_the_run_by_name(
    tiny: TinyRun, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "step-000001.parquet")

    with monkeypatch.context() as patch:
        patch.setattr(synchronous, "write_rollouts", fail)
        failed = tiny.train()
    assert failed.status == 1
    assert f"{os.strerror(code)}: 'step-000001.parquet'" in failed.err
    assert "Traceback" not in failed.err
    assert_checkpoints_are_whole(tiny.run_dir, "step-000000")
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_run_folder_that_is_removed_ends_the_run_and_is_not_made_again(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action=f"remove:{tiny.run_dir}")
    ended = tiny.train()
    assert ended.status == 2
    assert f"{tiny.run_dir}/metrics.jsonl was removed, moved or replaced while the run was writing it" in ended.err
    assert not tiny.run_dir.exists()
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_removed_checkpoints_do_not_end_a_run_that_still_knows_its_weights(tiny: TinyRun, undisturbed: Path):
    checkpoints = tiny.run_dir / "checkpoints"
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action=f"remove:{checkpoints}")
    assert tiny.train().status == 0
    assert_checkpoints_are_whole(tiny.run_dir, "step-000004", "step-000006")
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.parametrize("dtype", sampled("float32", "bfloat16"))
def test_room_for_a_checkpoint_is_looked_for_before_the_warm_start(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, dtype: str
):
    assert tiny.train("--trainer.num_steps=1", f"--model.dtype={dtype}", "--run.name=measured").status == 0
    checkpoint = tiny.run_dir.with_name("measured") / "checkpoints" / "step-000001"
    needed = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    room = checkpoint_module.FREE_BYTES_MARGIN + model_folder.FOLDER_BYTES
    usage = shutil.disk_usage(tiny.folder)
    # The checkpoint's JSON files, and what is left free beside them, are the estimate's error.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed + room - 100_000))
    refused = tiny.train(f"--model.dtype={dtype}")
    assert refused.status == 2
    assert "a checkpoint in" in refused.err and "Free some space" in refused.err
    assert not metrics_rows(tiny.run_dir, "sft")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed + room + 100_000))
    assert tiny.train(f"--model.dtype={dtype}", "--trainer.num_steps=1").status == 0
