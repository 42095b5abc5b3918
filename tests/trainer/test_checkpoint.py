"""Checkpoints: whole or absent, whatever happens while one is written."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.checkpoint_writer import NUM_ELEMENTS, write
from transformers import PreTrainedModel

from ratoon.layout import pack_sequences
from ratoon.models import FreshModelConfig, LoraConfig, ModelConfig, build_policy, forward_logprobs
from ratoon.models.config import Dtype
from ratoon.trainer import MasterOptimizer
from ratoon.trainer import checkpoint as checkpoint_module
from ratoon.trainer.checkpoint import (
    FREE_BYTES_MARGIN,
    checkpoint_name,
    checkpoint_step,
    clean_leftovers,
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ratoon.trainer.model_folder import model_file_bytes, save_model
from ratoon.types import UserError

FRESH = FreshModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
WRITER = Path(__file__).with_name("checkpoint_writer.py")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_whole(path: Path) -> None:
    """Read without the manifest's help: every number in it is the step's."""
    step = checkpoint_step(path)
    assert step is not None
    assert load_file(path / "model.safetensors")["weight"].eq(step).all()
    assert json.loads((path / "config.json").read_text()) == {"step": step}
    loaded = load_checkpoint(path)
    assert loaded.step == step and loaded.position == {"epoch": 0, "next_prompt": step}
    assert loaded.state["moments"][0].shape == (NUM_ELEMENTS,) and loaded.state["moments"][0].eq(step).all()
    assert loaded.state["betas"] == (0.9, 0.999)


def refuse_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def test_what_is_saved_is_loaded(tmp_path: Path):
    path = write(tmp_path / "checkpoints", 10)
    assert path.name == "step-000010"
    assert latest_checkpoint(tmp_path / "checkpoints", warn=refuse_warning) == path
    assert_whole(path)
    assert names(tmp_path / "checkpoints") == ["step-000010"]


def test_none_is_found_before_the_first(tmp_path: Path):
    """OpenRLHF#928: the same command must work whether or not there is a checkpoint."""
    assert latest_checkpoint(tmp_path / "absent", warn=refuse_warning) is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert latest_checkpoint(tmp_path, warn=refuse_warning) is None


def test_the_newest_is_by_number_not_by_name(tmp_path: Path):
    for step in (999_999, 1_000_000):
        write(tmp_path, step)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and checkpoint_step(latest) == 1_000_000
    assert checkpoint_name(1_000_000) == "step-1000000"


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [(1, ["step-000004"]), (2, ["step-000003", "step-000004"]), (9, [f"step-00000{step}" for step in range(1, 5)])],
)
def test_the_last_few_stay(tmp_path: Path, keep_last: int, left: list[str]):
    for step in range(1, 5):
        write(tmp_path, step, keep_last=keep_last)
    assert names(tmp_path) == left
    assert_whole(tmp_path / left[-1])


def test_keeping_none_is_refused(tmp_path: Path):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=r"keep_checkpoints must be at least 1, got 0"):
        write(tmp_path, 2, keep_last=0)
    assert names(tmp_path) == ["step-000001"]


def test_a_damaged_one_does_not_push_out_a_whole_one(tmp_path: Path):
    for step in (1, 2, 3):
        write(tmp_path, step, keep_last=9)
    (tmp_path / "step-000003" / "model.safetensors").unlink()
    write(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == ["step-000002", "step-000004"]


def test_a_damaged_checkpoint_of_the_step_is_replaced(tmp_path: Path):
    write(tmp_path, 5)
    (tmp_path / "step-000005" / "config.json").write_text("damaged")
    write(tmp_path, 5)
    assert names(tmp_path) == ["step-000005"]
    assert_whole(tmp_path / "step-000005")
    (tmp_path / "step-000006").write_text("a file")
    write(tmp_path, 6)
    assert_whole(tmp_path / "step-000006")


def test_a_whole_checkpoint_of_the_step_stays(tmp_path: Path):
    """So that there is no moment at which a step that was saved is not there."""
    inode = write(tmp_path, 5).stat().st_ino
    assert write(tmp_path, 5).stat().st_ino == inode
    assert_whole(tmp_path / "step-000005")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FILES = [
    "model.safetensors",
    "config.json",
    "manifest.json",
    "trainer_state/tensors.safetensors",
    "trainer_state/state.json",
    "trainer_state/position.json",
]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path: Path, name: str, damage: Any):
    """prime-rl#1712: resume picked a checkpoint that was not whole."""
    for step in (1, 2):
        write(tmp_path, step)
    damage(tmp_path / "step-000002" / name)
    said: list[str] = []
    assert latest_checkpoint(tmp_path, warn=said.append) == tmp_path / "step-000001"
    assert_whole(tmp_path / "step-000001")
    (warning,) = said
    assert "step-000002 is damaged" in warning and Path(name).name in warning
    with pytest.raises(UserError, match=Path(name).name):
        load_checkpoint(tmp_path / "step-000002")


def test_a_folder_someone_made_is_no_checkpoint(tmp_path: Path):
    write(tmp_path, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000003").write_text("a file")
    said: list[str] = []
    assert latest_checkpoint(tmp_path, warn=said.append) == tmp_path / "step-000001"
    assert len(said) == 2 and all("no manifest.json" in text for text in said)


def test_when_all_are_damaged_the_run_does_not_start_from_nothing(tmp_path: Path):
    for path in [write(tmp_path, step) for step in (1, 2)]:
        truncate(path / "model.safetensors")
    with pytest.raises(UserError, match=r"every checkpoint .* newest of 2 thus: model.safetensors has .* --fresh"):
        latest_checkpoint(tmp_path, warn=lambda _: None)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_manifest_that_is_no_file_is_none(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / "manifest.json")
    assert find_damage(tmp_path) == "it has no manifest.json"


def test_another_format_is_said_to_be_one(tmp_path: Path):
    manifest = write(tmp_path, 1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    assert "version 99" in (find_damage(manifest.parent) or "")


def test_a_small_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, 1)
    needed = 8 * NUM_ELEMENTS + FREE_BYTES_MARGIN  # the model and one tensor of state
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"needs 0\.07 GB.*0\.07 GB free.*nothing was written"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step-000001"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    write(tmp_path, 2)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("filled_by", ["the model", "the state"])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, filled_by: str
):
    monkeypatch.setattr(checkpoint_module, "FREE_BYTES_MARGIN", -(10**9))  # as if the space went while writing
    checkpoints = tiny_disk / "checkpoints"
    write(checkpoints, 1)  # 800 kB
    if filled_by == "the state":
        (tiny_disk / "rollouts").write_bytes(bytes(200_000))
    else:
        (tiny_disk / "rollouts").write_bytes(bytes(600_000))
    with pytest.raises(UserError, match=r"disk filled up while checkpoint step-000002"):
        write(checkpoints, 2)
    assert names(checkpoints) == ["step-000001"]
    assert_whole(checkpoints / "step-000001")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")])
def test_running_out_of_space_is_the_users_to_mend(tmp_path: Path, error: OSError):
    write(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(UserError, match="earlier checkpoints are whole"):
        save_checkpoint(tmp_path, 2, model_writer=fail, model_bytes=0, state={}, position={})
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), KeyboardInterrupt(), KeyError("lm_head")])
def test_any_other_failure_is_raised_as_it_is(tmp_path: Path, error: BaseException):
    write(tmp_path, 1)

    def fail(folder: Path) -> None:
        raise error

    with pytest.raises(type(error)):
        save_checkpoint(tmp_path, 2, model_writer=fail, model_bytes=0, state={}, position={})
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("position", [{"loss": float("nan")}, {"order": {1, 2}}])
def test_a_position_that_is_not_json_writes_nothing(tmp_path: Path, position: dict[str, Any]):
    with pytest.raises((ValueError, TypeError)):
        save_checkpoint(tmp_path, 1, model_writer=lambda folder: None, model_bytes=0, state={}, position=position)
    assert names(tmp_path) == []


def test_leftovers_of_killed_processes_go(tmp_path: Path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".partial-step-000002")
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".partial-removed-step-000000")
    assert latest_checkpoint(tmp_path, warn=refuse_warning) == tmp_path / "step-000001"
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["step-000001"]


class Killed(NamedTuple):
    latest: Path | None
    num_written: int


def kill_after(folder: Path, delay_s: float) -> Killed:
    """Starts the writer, kills it `delay_s` after its first checkpoint, and resumes as a run would."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen(
        [sys.executable, str(WRITER), str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "1\n"
    time.sleep(delay_s)
    writer.send_signal(signal.SIGKILL)
    num_written = 1 + len(writer.stdout.read().split())
    assert writer.wait(timeout=60) == -signal.SIGKILL
    return Killed(latest_checkpoint(folder, warn=refuse_warning), num_written)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, seed: int):
    """prime-rl#1712. What had been reported as written is what resume finds, or one newer."""
    killed = kill_after(tmp_path, random.Random(seed).uniform(0.0, 0.5))
    assert killed.latest is not None
    assert_whole(killed.latest)
    assert checkpoint_step(killed.latest) in (killed.num_written, killed.num_written + 1)
    assert_whole(write(tmp_path, killed.num_written + 2))  # the run goes on
    assert all(checkpoint_step(tmp_path / name) is not None for name in names(tmp_path)), "no leftovers"


def _adapted_policy(checkpoint: Path | None, dtype: Dtype) -> tuple[PreTrainedModel, MasterOptimizer]:
    config = ModelConfig(fresh=FRESH, dtype=dtype, lora=LoraConfig(rank=2, alpha=4))
    model = build_policy(config, seed=3, checkpoint=checkpoint)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.1, betas=(0.9, 0.95))
    if checkpoint is not None:
        optimizer.load_state_dict(load_checkpoint(checkpoint).state["optimizer"])
    return model, optimizer


def _update(model: PreTrainedModel, optimizer: MasterOptimizer) -> None:
    logprobs_M, _ = forward_logprobs(model, pack_sequences([[3, 4, 5, 6, 9], [3, 4, 7]]))
    (-logprobs_M.mean()).backward()
    optimizer.accumulate()
    optimizer.step(learning_rate=0.003, max_grad_norm=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_adapters_resumes_bit_by_bit(tmp_path: Path, dtype: Dtype):
    """The checkpoint holds adapters and their optimizer's state alone; the base comes from the recipe. In 16 bits the
    masters too must come back: the adapters are their rounding."""
    undisturbed, optimizer = _adapted_policy(None, dtype)
    for step in range(4):
        _update(undisturbed, optimizer)
        if step == 1:
            checkpoint = save_checkpoint(
                tmp_path,
                2,
                model_writer=partial(save_model, undisturbed, None),
                model_bytes=model_file_bytes(undisturbed),
                state={"optimizer": optimizer.state_dict()},
                position={},
            )
            assert {"adapter_model.safetensors", "adapter_config.json", "base_model.json", "manifest.json"} <= set(
                names(checkpoint)
            )
            assert not list(checkpoint.glob("model*.safetensors"))
    resumed, optimizer = _adapted_policy(tmp_path / "step-000002", dtype)
    for _ in range(2):
        _update(resumed, optimizer)
    expected = dict(undisturbed.named_parameters())
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    begun_anew, _ = _adapted_policy(None, dtype)
    assert any(not torch.equal(value, expected[name]) for name, value in begun_anew.named_parameters())
