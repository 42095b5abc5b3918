"""Runs that die, and runs that meet: nothing is lost, nothing is trained twice."""

import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from tests.loop.run_process import kill, start, wait_for
from tests.loop.tiny_run import TinyRun, traces


def has_rows(run_dir: Path, phase: str, count: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(f'"phase": "{phase}"'.encode()) >= count


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "in the warm start": lambda run: has_rows(run, "sft", 1),
    "as the first checkpoint is written": lambda run: any((run / "checkpoints").glob(".partial-*")),
    "after the first evaluation": lambda run: has_rows(run, "evaluate", 1),
    "in step 1": lambda run: (run / "checkpoints" / "step-000000").exists(),
    "after a step without a checkpoint": lambda run: (run / "rollouts" / "step-000003.parquet").exists(),
    "as a later checkpoint is written": lambda run: (
        (run / "rollouts" / "step-000004.parquet").exists() and any((run / "checkpoints").glob(".partial-*"))
    ),
    "at the end of an epoch": lambda run: (run / "checkpoints" / "step-000004").exists(),
    "between the last checkpoint and the last evaluation": lambda run: (run / "checkpoints" / "step-000006").exists(),
}
SAMPLED = ("after a step without a checkpoint", "between the last checkpoint and the last evaluation")


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.full) for name in MOMENTS]
)
def test_killed_run_goes_on_to_bitwise_the_same_end(
    tiny: TinyRun, undisturbed: Path, forks: ForkServerContext, moment: str
):
    process = start(forks, tiny)
    wait_for(lambda: MOMENTS[moment](tiny.run_dir), process)
    assert kill(process), (tiny.folder / "output").read_text()
    outcome = tiny.train()
    assert (outcome.status, outcome.err) == (0, "")
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_second_process_on_one_folder_is_refused_by_name(tiny: TinyRun, undisturbed: Path, forks: ForkServerContext):
    process = start(forks, tiny)
    wait_for(lambda: has_rows(tiny.run_dir, "sft", 1), process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for arguments in ([], ["--fresh"]):
            refused = tiny.train(*arguments)
            assert refused.status == 2
            assert f"held by another process (pid {process.pid})" in refused.err
            assert str(tiny.run_dir) in refused.err
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join(timeout=60)
    assert process.exitcode == 0, (tiny.folder / "output").read_text()
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_interrupt_from_outside_ends_with_a_checkpoint_and_status_130(
    tiny: TinyRun, undisturbed: Path, forks: ForkServerContext
):
    process = start(forks, tiny)
    wait_for(lambda: has_rows(tiny.run_dir, "train", 1), process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=60)
    printed = (tiny.folder / "output").read_text()
    assert process.exitcode == 130, printed
    assert "stopping after what is in progress" in printed
    assert "Traceback" not in printed
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)
