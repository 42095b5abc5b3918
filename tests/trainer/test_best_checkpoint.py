"""The checkpoint with the best held-out reward is found from what is on disk, and stays."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.metrics import MetricsLog
from ratoon.trainer.best_checkpoint import best_checkpoint, best_step
from ratoon.trainer.checkpoint import checkpoint_name, save_checkpoint
from ratoon.types import UserError


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(run: Path, step: int, *, keep_last: int = 9, keep_steps: tuple[int, ...] = ()) -> Path:
    return save_checkpoint(
        run / "checkpoints",
        step,
        model_writer=write_config,
        model_bytes=8,
        state={"weight": torch.full((3,), float(step))},
        position={"step": step},
        keep_last=keep_last,
        keep_steps=keep_steps,
    )


def log(run: Path, rewards: dict[int, float]) -> None:
    with MetricsLog(run / "metrics.jsonl") as metrics:
        for step, reward in rewards.items():
            metrics.log(step, "train", reward_mean=9.0)
            metrics.log(step, "evaluate", reward_mean=reward)


def kept(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def test_best_stays_beside_the_last_few(tmp_path: Path):
    for step in range(6):
        save(tmp_path, step, keep_last=2, keep_steps=(1,))
    assert kept(tmp_path) == [1, 4, 5]
    save(tmp_path, 6, keep_last=2, keep_steps=(6,))
    assert kept(tmp_path) == [5, 6]


def test_damaged_checkpoint_is_not_kept_as_the_best(tmp_path: Path):
    damaged = save(tmp_path, 1)
    (damaged / "config.json").unlink()
    for step in (2, 3):
        save(tmp_path, step, keep_last=1, keep_steps=(1,))
    assert kept(tmp_path) == [3]


def test_highest_reward_with_a_checkpoint_is_the_best(tmp_path: Path):
    """Step 0 is no result, 2 has no checkpoint, and of two equals the earlier one was there first."""
    log(tmp_path, {0: 1.0, 1: 0.2, 2: 0.9, 3: 0.5, 4: 0.5, 5: float("nan")})
    for step in (0, 1, 3, 4, 5):
        save(tmp_path, step)
    assert best_step(tmp_path) == 3
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000003"
    assert best_step(tmp_path, saving=2) == 2
    assert best_step(tmp_path, saving=5) == 3


def test_damaged_best_is_passed_over_by_name(tmp_path: Path):
    log(tmp_path, {1: 0.2, 3: 0.5})
    for step in (1, 3):
        save(tmp_path, step)
    config = tmp_path / "checkpoints" / "step-000003" / "config.json"
    config.write_text("[]")  # as long as before: only its digest tells
    said: list[str] = []
    assert best_checkpoint(tmp_path, warn=said.append).name == "step-000001"
    assert "step-000003 is damaged" in said[0]
    config.unlink()
    assert best_step(tmp_path) == 1


@pytest.mark.parametrize("what", ["no run", "no evaluation", "no checkpoint"])
def test_run_without_a_best_is_a_clear_error(what: str, tmp_path: Path):
    if what == "no evaluation":
        (tmp_path / "metrics.jsonl").touch()
        save(tmp_path, 1)
    if what == "no checkpoint":
        log(tmp_path, {1: 0.5})
    with pytest.raises(UserError, match="run folder" if what == "no run" else r"evaluation\.keep_best"):
        best_checkpoint(tmp_path)
    if what != "no run":
        assert best_step(tmp_path) is None


def test_metrics_row_that_is_no_number_is_no_best(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "phase": "evaluate", "reward_mean": "high"}) + "\n")
    save(tmp_path, 1)
    assert best_step(tmp_path) is None


@settings(max_examples=15, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6),
    keep_last=st.integers(1, 2),
    scheduled=st.integers(1, 4),
)
def test_a_run_never_loses_its_best(
    rewards: list[float], keep_last: int, scheduled: int, tmp_path_factory: pytest.TempPathFactory
):
    """The loop's own order: evaluate, then save on schedule or a new best. Oracle: the first maximum so far."""
    run = tmp_path_factory.mktemp("run")
    try:
        for step, reward in enumerate(rewards, start=1):
            log(run, {step: reward})
            best = best_step(run, saving=step)
            if step % scheduled == 0 or best == step:
                save(run, step, keep_last=keep_last, keep_steps=() if best is None else (best,))
            wanted = rewards.index(max(rewards[:step])) + 1
            assert best_checkpoint(run).name == checkpoint_name(wanted)
            assert len(kept(run)) <= keep_last + 1
    finally:
        shutil.rmtree(run)
