"""What a resumed run restores: data order, chance, optimizer, schedule, counters and policy version."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.loop.tiny_run import SCORES_PER_STEP, VARIANTS, TinyRun, metrics_rows, rollouts, traces
from tests.sampling import sampled

from ratoon.trainer.checkpoint import load_checkpoint

SEVERAL = VARIANTS["several updates a step"]


def prompts_of(run_dir: Path) -> list[list[str]]:
    """By step, the prompts in the order of their groups."""
    return [list(dict.fromkeys(row["prompt"] for row in table)) for table in rollouts(run_dir).values()]


def adamw_steps(checkpoint: Path) -> set[float]:
    state: dict[int, dict[str, Any]] = load_checkpoint(checkpoint).state["optimizer"]["adamw"]["state"]
    return {float(moments["step"]) for moments in state.values()}


@pytest.mark.parametrize("stopped_in", [1, *(pytest.param(step, marks=pytest.mark.full) for step in (2, 3, 4, 5, 6))])
def test_schedule_versions_draws_and_counters_go_on(
    tiny: TinyRun, undisturbed_of: Callable[[str], Path], stopped_in: int
):
    """OpenRLHF#1103, prime-rl#745, NeMo-RL#3599: no prompt twice in an epoch, none left out."""
    tiny.trigger(after_scores=3 + (stopped_in - 1) * SCORES_PER_STEP + 3, action="interrupt")
    assert tiny.train(*SEVERAL).status == 130
    assert len(metrics_rows(tiny.run_dir, "train")) == stopped_in
    assert tiny.train(*SEVERAL).status == 0
    whole = undisturbed_of("several updates a step")
    assert traces(tiny.run_dir) == traces(whole)

    rates = [row["learning_rate"] for row in metrics_rows(tiny.run_dir, "train")]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])  # a warm-up of two steps, then a half cosine
    assert rates[3:] == pytest.approx([1e-2 * share for share in (0.853553, 0.5, 0.146447)], rel=1e-5)
    for step, table in enumerate(rollouts(tiny.run_dir).values(), start=1):
        assert {row["step"] for row in table} == {step}
        assert {row["policy_version"] for row in table} == {step - 1}
        assert {version for row in table for version in row["policy_versions"]} == {step - 1}
    assert [row["staleness_max"] for row in metrics_rows(tiny.run_dir, "train")] == [0] * 6
    prompts = prompts_of(tiny.run_dir)
    epoch = [prompt for step in prompts[:4] for prompt in step]
    assert len(set(epoch)) == len(epoch) == 8
    assert len({prompt for step in prompts[4:] for prompt in step}) == 4
    assert adamw_steps(tiny.run_dir / "checkpoints" / "step-000006") == {12.0}  # two updates a step


def test_warm_start_leaves_no_optimizer_state(tiny: TinyRun):
    """tinker#446: the warm start's moments are not the policy's."""
    assert tiny.train("--trainer.num_steps=2").status == 0
    assert adamw_steps(tiny.run_dir / "checkpoints" / "step-000000") == set()
    assert adamw_steps(tiny.run_dir / "checkpoints" / "step-000002") == {2.0}


def test_run_that_begins_from_a_checkpoint_is_a_new_run(tiny: TinyRun):
    """tinker#446: a checkpoint as `model.path` gives its weights, and nothing else."""
    assert tiny.train("--trainer.num_steps=4").status == 0
    start = tiny.folder / "start"
    shutil.copytree(tiny.run_dir / "checkpoints" / "step-000004", start)
    text = tiny.recipe.read_text()
    tiny.recipe.write_text(
        text[: text.index("[model.fresh]")] + f'[model]\npath = "{start}"\n' + text[text.index("[data]") :]
    )
    tiny.edit(('name = "tiny"', 'name = "next"'), ("[sft]\nnum_steps = 3\nprompts_per_step = 3\n", ""))
    old, new = tiny.run_dir, tiny.run_dir.with_name("next")
    assert tiny.train("--trainer.num_steps=2").status == 0
    assert [row["step"] for row in metrics_rows(new, "train")] == [1, 2]
    assert prompts_of(new) == prompts_of(old)[:2]
    assert {row["policy_version"] for row in rollouts(new)["step-000001.parquet"]} == {0}
    assert adamw_steps(new / "checkpoints" / "step-000002") == {2.0}
    moved = [row["reward"] for row in rollouts(new)["step-000001.parquet"]]
    assert moved != [row["reward"] for row in rollouts(old)["step-000001.parquet"]], "other weights draw otherwise"


@pytest.mark.parametrize("file", sampled("model.safetensors", "trainer_state/tensors.safetensors", "manifest.json"))
def test_newest_checkpoint_truncated_by_hand(tiny: TinyRun, undisturbed: Path, file: str):
    """prime-rl#1712. The run goes on from the one before, and says so."""
    tiny.trigger(after_scores=3 + 4 * SCORES_PER_STEP + 3, action="raise")
    assert tiny.train().status == 2
    path = tiny.run_dir / "checkpoints" / "step-000004" / file
    os.truncate(path, path.stat().st_size // 2)
    outcome = tiny.train()
    assert (outcome.status, outcome.err) == (0, "")
    assert "step-000004 is damaged and was passed over" in outcome.out
    assert path.name in outcome.out
    assert "resuming after step 2" in outcome.out
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_all_checkpoints_truncated_by_hand_end_the_command(tiny: TinyRun):
    assert tiny.train("--trainer.num_steps=1").status == 0
    for path in (tiny.run_dir / "checkpoints").glob("*/model.safetensors"):
        os.truncate(path, 100)
    refused = tiny.train()
    assert refused.status == 2
    assert "every checkpoint in" in refused.err
    assert "--fresh" in refused.err


@pytest.mark.parametrize("how", sampled("backwards all the time", "an hour back on resume"))
def test_clock_that_jumps_backwards_changes_nothing(
    tiny: TinyRun, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    now = time.time()

    def back() -> float:
        nonlocal now
        now -= 60.0 if how == "backwards all the time" else 0.0
        return now

    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action="interrupt")
    if how != "backwards all the time":
        assert tiny.train().status == 130
        now -= 3600
    monkeypatch.setattr(time, "time", back)
    while (status := tiny.train().status) == 130:
        pass
    assert status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)
    assert all(row["step_s"] > 0 for row in metrics_rows(tiny.run_dir, "train"))
