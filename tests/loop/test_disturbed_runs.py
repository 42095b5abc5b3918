"""Signals, full disks, lost readers, and user functions that meddle: a run goes on, or says why it ended."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.loop.tiny_run import SCORES_PER_STEP, TinyRun, metrics_rows, traces
from tests.sampling import sampled

from ratoon.loop import synchronous
from ratoon.rollout.engines.transformers import TransformersEngine


@pytest.mark.parametrize("action", sampled("terminate", "terminate-twice"))
def test_sigterm_ends_after_the_step_with_a_checkpoint(tiny: TinyRun, undisturbed: Path, action: str):
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action=action)
    stopped = tiny.train()
    assert stopped.status == 143
    assert "SIGTERM: stopping after what is in progress" in (tiny.run_dir / "run.log").read_text()
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000003"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


@pytest.mark.full
def test_reader_that_goes_does_not_end_the_run(tiny: TinyRun, undisturbed: Path, monkeypatch: pytest.MonkeyPatch):
    """`ratoon train ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as output:
        patch.setattr(sys, "stdout", output)
        assert tiny.train().status == 0
    log = (tiny.run_dir / "run.log").read_text()
    assert log.count("the output cannot be written any more") == 1
    assert "Run tiny complete" in log
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_closed_output_does_not_end_the_run(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    """`ratoon train ... >&-`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert tiny.train("--trainer.num_steps=1").status == 0
        sys.stdout.close()


@pytest.mark.full
def test_reward_that_closes_the_output_does_not_end_the_run(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    (tiny.folder / "reward.py").write_text("import sys\ndef score(response):\n    sys.stdout.close()\n    return 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open(os.devnull, "w"))  # noqa: SIM115 (the reward closes it)
        assert tiny.train("--trainer.num_steps=1").status == 0
    assert "Run tiny complete" in (tiny.run_dir / "run.log").read_text()


@pytest.mark.parametrize("what", sampled("rollouts", "run.log"))
def test_full_disk_is_the_users_to_mend(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, what: str):
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if what == "rollouts":
        monkeypatch.setattr(synchronous, "write_rollouts", fill)
    else:
        tiny.run_dir.mkdir(parents=True)
        (tiny.run_dir / "run.log").symlink_to("/dev/full")  # fails at each line, and again when it is closed
    for _ in range(2):
        full = tiny.train()
        assert full.status == 2
        assert f"the disk that holds run folder {tiny.run_dir} is full" in full.err


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [asyncio.CancelledError("gone"), GeneratorExit("gone"), UnspeakableError()])
def test_whatever_ends_a_run_is_named(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(TransformersEngine, "generate", fail)
    failed = tiny.train()
    assert failed.status == 1
    assert type(error).__name__ in failed.err
    assert "Traceback" not in failed.err
    assert "Traceback" in (tiny.run_dir / "run.log").read_text()


@pytest.mark.full
def test_reward_that_changes_the_folder_leaves_the_run_in_one(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    elsewhere = tiny.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tiny.folder)
    source = f"import os\ndef score(response):\n    os.chdir({str(elsewhere)!r})\n    return len(response)\n"
    (tiny.folder / "reward.py").write_text(source)
    outcome = tiny.train("--run.output_dir=runs", "--trainer.num_steps=2")
    assert outcome.status == 0
    assert not list(elsewhere.iterdir())
    assert len(list((tiny.run_dir / "rollouts").iterdir())) == 2
    assert "ratoon export runs/tiny tiny-model" in outcome.out


@pytest.mark.full
def test_changed_user_file_is_warned_of_on_resume(tiny: TinyRun):
    tiny.train("--trainer.num_steps=2")
    assert "has changed" not in tiny.train("--trainer.num_steps=3").out
    reward = tiny.folder / "reward.py"
    reward.write_text(reward.read_text() + "\n# changed\n")
    warned = tiny.train("--trainer.num_steps=4")
    assert warned.status == 0
    assert "the Python file that reward.function names has changed since the checkpoint of step 3" in warned.out


@pytest.mark.full
def test_changed_filter_and_demonstrations_are_told_of_for_what_they_do(tiny: TinyRun):
    """A filter that lets other prompts through ends the run by name, and the file that did it is named before."""
    (tiny.folder / "keep.py").write_text("def keep(prompt):\n    return True\n")
    (tiny.folder / "show.py").write_text("def show(prompt):\n    return prompt\n")
    arguments = ("--data.filter=python:keep.py:keep", "--sft.demonstrations=python:show.py:show")
    assert tiny.train(*arguments, "--trainer.num_steps=2").status == 0
    (tiny.folder / "show.py").write_text("def show(prompt):\n    return prompt[::-1]\n")
    shown = tiny.train(*arguments, "--trainer.num_steps=3").out
    assert "sft.demonstrations names has changed since the checkpoint of step 2: the warm start followed" in shown
    assert "steps from here on" not in shown
    (tiny.folder / "keep.py").write_text("def keep(prompt):\n    return not prompt.startswith('a')\n")
    refused = tiny.train(*arguments, "--trainer.num_steps=4")
    assert refused.status == 2 and "with other prompts" in refused.err
    assert "the Python file that data.filter names has changed" in refused.out


def test_edited_metrics_rows_do_not_break_the_final_page(tiny: TinyRun):
    tiny.train("--trainer.num_steps=1")
    with (tiny.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "phase": "train"}\n{"step": 0, "phase": "evaluate", "reward_mean": "high"}\n')
    assert tiny.train("--trainer.num_steps=2").status == 0
    assert len(metrics_rows(tiny.run_dir, "train")) == 3


def test_page_of_a_stopped_warm_start_names_no_rollouts(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synchronous, "scheduled_rate", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT) or 0.1)
    stopped = tiny.train()
    assert "Run tiny stopped" in stopped.out
    assert str(tiny.run_dir / "rollouts") not in stopped.out
