"""Whole runs of a tiny model: what they leave behind, how they go on, how they end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loop.tiny_run import SCORES_PER_STEP, WORDS, TinyRun, metrics_rows, rollouts, snapshot, traces
from tests.sampling import sampled

from ratoon.config.loading import load_recipe
from ratoon.loop import synchronous
from ratoon.models import build_policy
from ratoon.rollout.engines.transformers import TransformersEngine


def test_run_leaves_recipe_metrics_rollouts_checkpoints_and_log(tiny: TinyRun):
    outcome = tiny.train()
    assert outcome.status == 0
    assert outcome.err == ""
    assert {path.name for path in tiny.run_dir.iterdir()} >= {
        "recipe.toml", "metrics.jsonl", "rollouts", "checkpoints", "run.log",
    }  # fmt: skip
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "sft")] == [1, 2, 3]
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "evaluate")] == [0, 6]
    assert [path.name for path in sorted((tiny.run_dir / "checkpoints").iterdir())] == [
        "step-000000", "step-000002", "step-000004", "step-000006",
    ]  # fmt: skip
    tables = rollouts(tiny.run_dir)
    assert list(tables) == [f"step-{step:06d}.parquet" for step in range(1, 7)]
    rows = [row for table in tables.values() for row in table]
    assert len(rows) == 6 * SCORES_PER_STEP
    assert all(row["reward"] == row["response"].count("a") + 0.1 * len(row["response"]) for row in rows)
    assert {letter for row in rows for letter in row["response"]} <= set("abcdefgh")
    assert any(row["response"] for row in rows)
    log = (tiny.run_dir / "run.log").read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if "attention: " in line]
    assert "forward flash-cpu, backward flash-cpu (" in line and "global): choices.toml, row 1 for cpu" in line


def test_what_a_reward_prints_stands_in_the_run_folder(tiny: TinyRun):
    reward = tiny.folder / "reward.py"
    reward.write_text(reward.read_text() + "\nprint('a reward prints', __name__[:12])\n")
    assert tiny.train("--trainer.num_steps=1").status == 0
    assert (tiny.run_dir / "rewards.log").read_text() == "a reward prints ratoon_user_\n"


def test_final_page_says_result_dedup_ratio_and_where_the_time_went(tiny: TinyRun):
    page = tiny.train().out
    before, after = (row["reward_mean"] for row in metrics_rows(tiny.run_dir, "evaluate"))
    assert f"{before:.3f} " in page
    assert f" {after:.3f}" in page
    train = metrics_rows(tiny.run_dir, "train")
    ratio = sum(row["num_logical_tokens"] for row in train) / sum(row["num_rows"] for row in train)
    assert f"dedup ratio            {ratio:.2f}" in page
    assert ratio > 1
    for words in ("Where the time went", "generate", "update", "checkpoint", "ratoon export", str(tiny.run_dir)):
        assert words in page


def test_the_console_shows_the_figures_of_the_metrics_file(tiny: TinyRun):
    lines = [line for line in tiny.train("--trainer.num_steps=2").out.splitlines() if line.startswith("grpo step")]
    rows = metrics_rows(tiny.run_dir, "train")
    assert len(lines) == len(rows) == 2
    for line, row in zip(lines, rows, strict=True):
        shown = dict(pair.split("=") for pair in line.split() if "=" in pair)
        del shown["eta_s"]
        assert {"logical_tokens_per_s", "computed_tokens_per_s", "reward_mean", "step_s"} <= shown.keys()
        for name, text in shown.items():
            assert float(text) == pytest.approx(row[name], rel=1e-3), name


def test_evaluation_uses_heldout_prompts_only(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    evaluated: set[str] = set()
    generate_groups = synchronous.evaluate.__globals__["generate_groups"]

    async def spy(engine, prompts, **settings):
        evaluated.update(prompt.text for prompt in prompts)
        return await generate_groups(engine, prompts, **settings)

    monkeypatch.setitem(synchronous.evaluate.__globals__, "generate_groups", spy)
    assert tiny.train("--evaluation.every_steps=2").status == 0
    trained = {row["prompt"] for table in rollouts(tiny.run_dir).values() for row in table}
    assert len(evaluated) == 3
    assert len(trained) == 8
    assert evaluated | trained == set(WORDS)
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "evaluate")] == [0, 2, 4, 6]


def test_complete_run_says_so_and_changes_nothing(tiny: TinyRun):
    tiny.train()
    before = snapshot(tiny.folder)
    again = tiny.train()
    assert again.status == 0
    assert "is complete: 6 steps" in again.out
    assert snapshot(tiny.folder) == before


@pytest.mark.parametrize("stop_at", sampled(1, 4))
def test_more_steps_continue_as_if_never_stopped(tiny: TinyRun, undisturbed: Path, stop_at: int):
    """verl#5725, verl#7401: step 4 ends an epoch exactly, where a resumed stream must begin the next one."""
    assert tiny.train("--trainer.num_steps", str(stop_at), "--data.num_heldout=3").status == 0
    longer = tiny.train()
    assert longer.status == 0
    assert f"resuming after step {stop_at}" in longer.out
    found, wanted = traces(tiny.run_dir), traces(undisturbed)
    found["metrics"] = [row for row in found["metrics"] if (row["phase"], row["step"]) != ("evaluate", stop_at)]
    assert found == wanted


def test_draws_anew_for_a_prompt_taken_twice_in_a_step(tiny: TinyRun):
    assert tiny.train("--rollout.prompts_per_step=20", "--trainer.num_steps=1").status == 0
    (table,) = rollouts(tiny.run_dir).values()
    by_prompt: dict[str, dict[str, list[list[int]]]] = {}
    for row in table:
        by_prompt.setdefault(row["prompt"], {}).setdefault(row["prompt_id"], []).append(row["token_ids"])
    assert sum(len(groups) for groups in by_prompt.values()) == 20
    assert len(by_prompt) == 8
    for groups in by_prompt.values():
        drawn = list(groups.values())
        assert all(drawn[0] != other for other in drawn[1:])


def test_fewer_steps_than_taken_are_a_complete_run(tiny: TinyRun):
    tiny.train()
    before = snapshot(tiny.folder)
    shorter = tiny.train("--trainer.num_steps=3")
    assert shorter.status == 0
    assert snapshot(tiny.folder) == before  # recipe.toml still describes the run that was made
    assert "is complete: 6 steps" in shorter.out
    assert "trainer.num_steps = 3" in shorter.out


@pytest.mark.parametrize(
    "override",
    [
        "--trainer.learning_rate=0.5",
        "--rollout.group_size=3",
        "--run.seed=7",
        "--algorithm.name=dapo",
        "--model.fresh.hidden_size=16",
        "--sft.num_steps=4",
        "--data.num_heldout=2",
        "--reward.score_truncated=false",
    ],
)
def test_changed_recipe_is_refused_by_the_names_of_its_keys(tiny: TinyRun, override: str):
    tiny.train("--trainer.num_steps=0")
    before = snapshot(tiny.folder)
    refused = tiny.train(override)
    assert refused.status == 2
    assert f"{override.removeprefix('--').partition('=')[0]}" in refused.err
    assert "--fresh" in refused.err
    assert "Traceback" not in refused.err
    assert snapshot(tiny.folder) == before


def test_length_and_evaluation_may_change(tiny: TinyRun):
    tiny.train("--trainer.num_steps=1")
    changed = tiny.train(
        "--trainer.num_steps=2", "--evaluation.every_steps=1", "--evaluation.group_size=2",
        "--evaluation.temperature=0.5", "--trainer.checkpoint_every_steps=1", "--rollout.timeout_s=99",
    )  # fmt: skip
    assert (changed.status, changed.err) == (0, "")
    assert metrics_rows(tiny.run_dir, "evaluate")[-1]["num_responses"] == 6


def test_fresh_sets_the_old_run_aside(tiny: TinyRun):
    tiny.train("--trainer.num_steps=1")
    old = snapshot(tiny.run_dir)
    for number in (1, 2):
        fresh = tiny.train("--fresh", "--trainer.num_steps=0", "--run.seed", "1")
        assert fresh.status == 0
        assert not metrics_rows(tiny.run_dir, "train")
        aside = tiny.run_dir.parent / f"tiny.{number}"
        assert aside.is_dir()
        for text in (fresh.out, (tiny.run_dir / "run.log").read_text()):
            assert f"the old run {tiny.run_dir} is set aside in {aside}\n" in text
    assert snapshot(tiny.run_dir.parent / "tiny.1") == old


def test_interrupt_ends_after_the_step_with_a_checkpoint(tiny: TinyRun, undisturbed: Path):
    before = signal.getsignal(signal.SIGINT)  # shells start background jobs with it ignored
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action="interrupt")
    stopped = tiny.train()
    assert stopped.status == 130
    assert "Run tiny stopped: 3 of 6 steps" in stopped.out
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000003"
    assert signal.getsignal(signal.SIGINT) is before
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_second_interrupt_ends_at_once_and_nothing_is_lost(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action="interrupt-twice")
    stopped = tiny.train()
    assert stopped.status == 130
    assert "goes on from the last checkpoint" in stopped.err
    assert "Traceback" not in stopped.err
    assert len(metrics_rows(tiny.run_dir, "train")) == 2
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [("interrupt", 130, "Ctrl-C again stops at once"), ("terminate", 143, "`kill -INT PID`, stops at once")],
)
def test_each_signal_says_what_stops_at_once(tiny: TinyRun, action: str, status: int, words: str):
    tiny.trigger(after_scores=1, action=action)
    stopped = tiny.train()
    assert stopped.status == status
    assert words.replace("PID", str(os.getpid())) in stopped.out


@pytest.mark.full
@pytest.mark.parametrize(("silence_s", "steps"), [(1e9, [1, 4, 8, 12, 16, 20]), (0.0, list(range(1, 21)))])
def test_warm_start_is_never_silent_for_long(
    silence_s: float, steps: list[int], tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
):
    """Its first step is shown, one in five, and the next one after ten seconds without any."""
    assert synchronous._SILENCE_S == 10
    monkeypatch.setattr(synchronous, "_SILENCE_S", silence_s)
    shown = tiny.train("--sft.num_steps=20", "--trainer.num_steps=0").out.splitlines()
    assert [line.split()[2] for line in shown if line.startswith("sft step")] == [f"{step}/20" for step in steps]


@pytest.mark.full
def test_interrupt_in_the_last_step_leaves_the_evaluation_to_the_next_command(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 5 * SCORES_PER_STEP + 3, action="interrupt")
    assert tiny.train().status == 130
    assert len(metrics_rows(tiny.run_dir, "evaluate")) == 1
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.full
def test_interrupt_in_the_first_evaluation_takes_no_step(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=1, action="interrupt")
    assert tiny.train().status == 130
    assert not metrics_rows(tiny.run_dir, "train")
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_interrupt_in_the_warm_start_begins_it_anew(tiny: TinyRun, undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(synchronous, "scheduled_rate", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT) or 0.1)
        stopped = tiny.train()
    assert stopped.status == 130
    assert "begins anew" in stopped.out
    assert len(metrics_rows(tiny.run_dir, "sft")) == 1
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_equal_rewards_are_warned_of_with_the_reason_of_the_zero_loss(tiny: TinyRun):
    """TRL#3452: a loss of 0 without a word."""
    (tiny.folder / "reward.py").write_text("def score(response):\n    return 0.25\n")
    outcome = tiny.train("--trainer.num_steps=2")
    assert outcome.status == 0
    assert "every group's rewards were equal (mean 0.25), so the policy loss is 0" in outcome.out
    assert outcome.out.count("rewards were equal") == 1
    assert all(row["loss"] == 0 and row["num_equal_reward_groups"] == 2 for row in metrics_rows(tiny.run_dir, "train"))


def test_truncated_responses_are_warned_of(tiny: TinyRun):
    """TRL#5697: every response cut, and the masked loss 0 without a word."""
    outcome = tiny.train("--rollout.max_response_tokens=1", "--trainer.num_steps=3", "--run.seed=3")
    assert outcome.status == 0
    train = metrics_rows(tiny.run_dir, "train")
    if any(row["num_truncated"] >= 0.9 * row["num_responses"] for row in train):
        assert "were cut by rollout.max_response_tokens" in outcome.out
    assert sum(row["num_truncated"] for row in train) > 0


def test_failing_reward_ends_the_run_with_its_cause_and_the_run_goes_on_once_mended(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 4 * SCORES_PER_STEP + 1, action="raise")
    failed = tiny.train()
    assert failed.status == 2
    assert "KeyError" in failed.err
    assert "reward.py" in failed.err
    assert "Traceback" not in failed.err
    assert failed.err.count("\n") == 1
    assert "Traceback" in (tiny.run_dir / "run.log").read_text()
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.full
def test_failing_reward_loses_none_of_the_steps_before_it(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 3 * SCORES_PER_STEP + 1, action="raise")
    assert tiny.train("--trainer.checkpoint_every_steps=50").status == 2
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000003"
    resumed = tiny.train("--trainer.checkpoint_every_steps=50")
    assert resumed.status == 0
    assert "resuming after step 3" in resumed.out
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.full
def test_failing_reward_in_an_evaluation_loses_no_step_and_the_evaluation_is_made_up_for(
    tiny: TinyRun, undisturbed: Path
):
    every = ("--evaluation.every_steps=3", "--trainer.checkpoint_every_steps=50")
    tiny.trigger(after_scores=3 + 3 * SCORES_PER_STEP + 1, action="raise")  # the evaluation after step 3
    assert tiny.train(*every).status == 2
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000003"
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "evaluate")] == [0]
    assert tiny.train(*every).status == 0
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "evaluate")] == [0, 3, 6]
    assert traces(tiny.run_dir)["files"] == traces(undisturbed)["files"]


def test_failing_reward_is_the_cause_though_nothing_can_be_saved(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    save_shared_checkpoint = synchronous.save_shared_checkpoint

    def save(folder: Path, step: int, **parts: Any) -> Path:
        if step == 3:
            raise OSError("the disk is on fire")
        return save_shared_checkpoint(folder, step, **parts)

    monkeypatch.setattr(synchronous, "save_shared_checkpoint", save)
    tiny.trigger(after_scores=3 + 3 * SCORES_PER_STEP + 1, action="raise")
    failed = tiny.train("--trainer.checkpoint_every_steps=50")
    assert failed.status == 2
    assert "KeyError" in failed.err
    assert "could not be saved either: the disk is on fire" in failed.out


def test_evaluation_that_lost_every_response_has_no_reward_to_show(tiny: TinyRun):
    (tiny.folder / "reward.py").write_text("def score(response):\n    raise ValueError\n")
    outcome = tiny.train("--trainer.num_steps=1", "--reward.on_failure=drop")
    assert outcome.status == 0
    (line,) = [line for line in outcome.out.splitlines() if line.strip().startswith("held-out reward   ")]
    assert line.split() == ["held-out", "reward", "not", "evaluated"]


@pytest.mark.full
def test_final_page_totals_failed_rewards_of_every_process_of_the_run(tiny: TinyRun):
    (tiny.folder / "reward.py").write_text(
        "def score(response):\n    if 'a' in response:\n        raise ValueError\n    return len(response)\n"
    )
    assert tiny.train("--trainer.num_steps=2", "--reward.on_failure=drop").status == 0
    outcome = tiny.train("--trainer.num_steps=4", "--reward.on_failure=drop")
    rows = metrics_rows(tiny.run_dir, "train")
    num_failed = sum(row["reward_failures"] for row in rows)
    assert num_failed > sum(row["reward_failures"] for row in rows[2:]) > 0
    assert f"reward failures        {num_failed} (raised {num_failed}); {num_failed} dropped" in outcome.out


def test_final_page_counts_the_warnings_about_the_data_too(tiny: TinyRun):
    (tiny.folder / "reward.py").write_text("def score(response):\n    return 0.25\n")
    with (tiny.folder / "words.jsonl").open("a") as file:
        file.write('{"answer": "a"}\n')
    outcome = tiny.train("--trainer.num_steps=3", "--data.bad_rows=drop")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    num_shown = sum(line.startswith("warning: ") for line in lines)
    assert num_shown == 2
    assert any(line.startswith("2 warnings above (given 4 times in all)") for line in lines)


def test_final_page_of_a_stopped_run_has_its_latest_evaluation(tiny: TinyRun):
    tiny.trigger(after_scores=2 * 3 + 2 * SCORES_PER_STEP + 3, action="interrupt")
    stopped = tiny.train("--evaluation.every_steps=2")
    assert stopped.status == 130
    assert "Run tiny stopped: 3 of 6 steps" in stopped.out
    before, after = (row["reward_mean"] for row in metrics_rows(tiny.run_dir, "evaluate"))
    assert f"{before:.3f} " in stopped.out and f" {after:.3f} after step 2 " in stopped.out


def test_failing_engine_ends_the_run_with_its_cause(tiny: TinyRun, undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    generate = TransformersEngine.generate

    async def explode(self, prompt, *, step, **others):
        if step == 2:
            raise RuntimeError("the cache is on fire")
        return await generate(self, prompt, step=step, **others)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", explode)
        failed = tiny.train()
    assert failed.status == 1
    assert "RuntimeError: the cache is on fire" in failed.err
    assert "run.log" in failed.err
    assert "Traceback" not in failed.err + failed.out
    assert "Traceback" in (tiny.run_dir / "run.log").read_text()
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_exported_folder_scores_as_the_checkpoint_does(tiny: TinyRun):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny.train("--trainer.num_steps=2")
    out = tiny.folder / "exported"
    exported = tiny.main(["export", str(tiny.run_dir), str(out)])
    assert exported.status == 0
    assert "AutoModelForCausalLM" in exported.out
    tokenizer = AutoTokenizer.from_pretrained(out)
    row = rollouts(tiny.run_dir)["step-000002.parquet"][0]
    ids = torch.tensor([tokenizer(row["prompt"]).input_ids + row["token_ids"]])
    logprobs = []
    for folder in (out, tiny.run_dir / "checkpoints" / "step-000002"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        logprobs.append(model(ids).logits.log_softmax(-1))
    assert torch.equal(*logprobs)
    refused = tiny.main(["export", str(tiny.run_dir), str(out)])
    assert refused.status == 2
    assert "not an empty folder" in refused.err


@pytest.mark.parametrize("overrides", [["--trainer.num_steps=0"], ["--data.num_heldout=0", "--trainer.num_steps=1"]])
def test_no_steps_and_no_heldout_prompts_are_runs_too(tiny: TinyRun, overrides: list[str]):
    first = tiny.train(*overrides)
    assert (first.status, first.err) == (0, "")
    again = tiny.train(*overrides)
    assert again.status == 0
    assert "is complete" in again.out


@pytest.mark.full
def test_checkpoints_removed_from_a_run_are_missed(tiny: TinyRun):
    tiny.train("--trainer.num_steps=2")
    shutil.rmtree(tiny.run_dir / "checkpoints")
    before = snapshot(tiny.run_dir)
    refused = tiny.train("--trainer.num_steps=2")
    assert refused.status == 2
    assert "holds no checkpoint to go on from" in refused.err
    assert snapshot(tiny.run_dir) == before
    assert tiny.train("--fresh").status == 0


def test_damaged_metrics_are_named_by_line(tiny: TinyRun):
    tiny.train("--trainer.num_steps=1")
    metrics = tiny.run_dir / "metrics.jsonl"
    metrics.write_text("what is this\n" + metrics.read_text())
    refused = tiny.train()
    assert refused.status == 2
    assert "metrics.jsonl, line 1" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize("name", ["run.log", "metrics.jsonl", "lock", "recipe.toml"])
def test_file_that_cannot_be_written_is_named(tiny: TinyRun, name: str):
    (tiny.run_dir / name).mkdir(parents=True)
    refused = tiny.train()
    assert refused.status == 2
    assert name in refused.err
    assert "Traceback" not in refused.err


def test_stored_recipe_that_cannot_be_read_is_said_to_be_the_run_folders(tiny: TinyRun):
    tiny.train("--trainer.num_steps=0")
    (tiny.run_dir / "recipe.toml").write_text("[trainer\n")
    refused = tiny.train()
    assert refused.status == 2
    assert str(tiny.run_dir) in refused.err
    assert "--fresh" in refused.err


def test_changed_data_is_refused_on_resume(tiny: TinyRun):
    tiny.train("--trainer.num_steps=2")
    words = tiny.folder / "words.jsonl"
    words.write_text("".join(line + "\n" for line in words.read_text().splitlines()[1:]))
    refused = tiny.train()
    assert refused.status == 2
    assert "other prompts" in refused.err


GYM = """\
[run]
name = "gym"
output_dir = "{folder}/runs"
[model.fresh]
hidden_size = 32
intermediate_size = 48
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
max_positions = 128
[data]
source = "reasoning-gym:spell_backward"
options = {{ min_word_len = 3, max_word_len = 3 }}
size = 30
num_heldout = 4
chat_template = false
[sft]
num_steps = 3
prompts_per_step = 4
[rollout]
prompts_per_step = 2
group_size = 4
max_response_tokens = 5
[reward]
function = "reasoning-gym"
[trainer]
num_steps = 4
"""


def test_verifiable_task_from_reasoning_gym(tiny: TinyRun):
    tiny.recipe.write_text(GYM.format(folder=tiny.folder))
    outcome = tiny.train()
    assert (outcome.status, outcome.err) == (0, "")
    run_dir = tiny.folder / "runs" / "gym"
    rows = [row for table in rollouts(run_dir).values() for row in table]
    assert len(rows) == 4 * 2 * 4
    assert all("Spell this word backward" in row["prompt"] and row["answer"] for row in rows)
    assert len(metrics_rows(run_dir, "sft")) == 3
    assert [row["num_responses"] for row in metrics_rows(run_dir, "evaluate")] == [4, 4]


@pytest.mark.full
def test_the_installed_command_trains_in_a_process_of_its_own(tiny: TinyRun):
    tiny.recipe.write_text(GYM.format(folder=tiny.folder))
    source = str(Path(synchronous.__file__).parents[2])
    for words in ("Run gym complete: 4 of 4 steps", "is complete: 4 steps"):
        done = subprocess.run(
            [sys.executable, "-m", "ratoon.cli.main", "train", str(tiny.recipe)],
            env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout


def test_the_first_update_begins_from_the_warm_start_in_16_bits_too(tiny: TinyRun):
    """Masters that were made before the warm start would undo it."""
    arguments = ("--model.dtype=bfloat16", "--trainer.num_steps=1", "--trainer.learning_rate=1e-12")
    assert tiny.train(*arguments, "--trainer.checkpoint_every_steps=1").status == 0
    before, after = (
        load_file(tiny.run_dir / "checkpoints" / name / "model.safetensors") for name in ("step-000000", "step-000001")
    )
    assert all(torch.equal(after[name], value) for name, value in before.items())
    fresh = build_policy(load_recipe(tiny.run_dir / "recipe.toml").model, seed=0).state_dict()
    assert any(not torch.equal(fresh[name], value) for name, value in before.items()), "the warm start did nothing"
