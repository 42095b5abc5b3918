"""`ratoon train` on two ranks against one process: same rollouts, same losses, one folder, one complaint."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.loop.several_ranks import start_ranks
from tests.loop.tiny_run import SCORES_PER_STEP, VARIANTS, Outcome, TinyRun, metrics_rows, rollouts, write_tiny_recipe
from tests.sampling import sampled

SHORT = ("--trainer.num_steps=3",)
COMPARED = (
    "loss", "grad_norm", "reward_mean", "entropy_mean", "num_rows", "num_logical_tokens", "num_loss_tokens",
    "learning_rate", "num_generated_tokens", "ratio_mean", "num_updates", "clipped_fraction", "num_responses",
    "kl_ref_mean", "pass_at_1", "response_tokens_mean", "dedup_ratio",
)  # fmt: skip


def figures(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {"phase": phase, "step": row["step"]} | {name: row[name] for name in COMPARED if row.get(name) is not None}
        for phase in ("sft", "train", "evaluate")
        for row in metrics_rows(run_dir, phase)
    ]


def drawn(run_dir: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What does not depend on rounding, as long as that turns no draw."""
    return {
        name: [(row["prompt_id"], row["response_index"], row["token_ids"], row["reward"]) for row in rows]
        for name, rows in rollouts(run_dir).items()
    }


def newest_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    (file,) = newest.glob("*.safetensors")
    return load_file(file)


def assert_same_run(got: Path, expected: Path) -> None:
    assert drawn(got) == drawn(expected)
    ours, theirs = figures(got), figures(expected)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["phase"] == other["phase"]
        numbers = [{name: value for name, value in row.items() if name != "phase"} for row in (mine, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6)
    for name, value in newest_weights(expected).items():
        torch.testing.assert_close(newest_weights(got)[name], value, rtol=1e-4, atol=1e-5, msg=name)


def run_of_one(folder: Path, command: Callable[[list[str]], Outcome], *arguments: str) -> Path:
    (folder / "one").mkdir()
    write_tiny_recipe(folder / "one")
    one = TinyRun(folder / "one", command)
    assert one.train(*arguments).status == 0
    return one.run_dir


CASES: dict[str, tuple[str, ...]] = {
    "sharded": ("--trainer.sharding=full",),
    "whole on each rank": ("--trainer.sharding=none",),
    "sharded, with a reference": (*VARIANTS["reference model"], "--evaluation.every_steps=2"),
    "a penalty in the reward": VARIANTS["a penalty in the reward"],
    "adapters": VARIANTS["adapters and their reference"],
    "dynamic sampling": VARIANTS["dynamic sampling"],
    "more ranks than prompts": ("--rollout.prompts_per_step=1",),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in list(CASES)[:1] else pytest.mark.full) for c in CASES]
)
def test_two_ranks_run_as_one(
    tiny: TinyRun, forks: ForkServerContext, command: Callable[[list[str]], Outcome], tmp_path: Path, case: str
):
    ranks = start_ranks(forks, tiny, *SHORT, *CASES[case])
    expected = run_of_one(tmp_path, command, *SHORT, *CASES[case])
    assert ranks.join() == (0, 0), ranks.said()
    assert_same_run(tiny.run_dir, expected)
    assert "2 processes train together" in ranks.said()[0]
    assert ranks.said()[1] == "", "the other ranks show nothing"
    again = start_ranks(forks, tiny, *SHORT, *CASES[case])
    assert again.join() == (0, 0)
    assert "is complete: 3 steps" in again.said()[0]


def test_one_then_two_then_one(tiny: TinyRun, forks: ForkServerContext, undisturbed: Path):
    """Each reads what the other number of ranks wrote."""
    assert tiny.train("--trainer.num_steps=2").status == 0
    ranks = start_ranks(forks, tiny, "--trainer.num_steps=4")
    assert ranks.join() == (0, 0), ranks.said()
    assert "resuming after step 2" in ranks.said()[0]
    assert (tiny.run_dir / "checkpoints" / "step-000004" / "trainer_state" / "shards").is_dir()
    assert tiny.train().status == 0
    assert_same_run_without_evaluations(tiny.run_dir, undisturbed)


def assert_same_run_without_evaluations(got: Path, expected: Path) -> None:
    """A run that ends at another step is evaluated there too."""
    for run_dir in (got, expected):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert any('"evaluate"' in line for line in lines)
    kept = [row for row in figures(got) if row["phase"] != "evaluate"]
    wanted = [row for row in figures(expected) if row["phase"] != "evaluate"]
    for mine, other in zip(kept, wanted, strict=True):
        assert mine.pop("phase") == other.pop("phase")
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert drawn(got) == drawn(expected)
    for name, value in newest_weights(expected).items():
        torch.testing.assert_close(newest_weights(got)[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.full
def test_a_failing_reward_is_told_once_and_no_step_is_lost(tiny: TinyRun, forks: ForkServerContext, undisturbed: Path):
    tiny.trigger(after_scores=3 + 3 * SCORES_PER_STEP + 1, action="raise")
    failed = start_ranks(forks, tiny, "--trainer.checkpoint_every_steps=50")
    assert failed.join() == (2, 2), failed.said()
    (complaint,) = failed.complaints()
    assert "no such" in complaint
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000003"
    resumed = start_ranks(forks, tiny)
    assert resumed.join() == (0, 0), resumed.said()
    assert_same_run(tiny.run_dir, undisturbed)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--reward.function=python:absent.py:score",), "absent.py"),
        pytest.param(("--reward.timeout_s=1800",), "trainer.rank_timeout_s = 1800", marks=pytest.mark.full),
        pytest.param(("--data.source=absent.jsonl",), "absent.jsonl", marks=pytest.mark.full),
        pytest.param(("--model.lora.rank=2", "--trainer.sharding=full"), "trainer.sharding", marks=pytest.mark.full),
        (("--trainer.sharding=half",), "trainer.sharding"),
    ],
)
def test_what_is_wrong_is_told_once(tiny: TinyRun, forks: ForkServerContext, wrong: tuple[str, ...], words: str):
    ranks = start_ranks(forks, tiny, *SHORT, *wrong)
    assert ranks.join() == (2, 2), ranks.said()
    (complaint,) = ranks.complaints()
    assert words in complaint


def fill_a_device(rank: int) -> None:
    """Rank 1's has less room than one step needs."""
    from ratoon.loop.device_memory import DeviceMemory

    room = 1 << (16 if rank == 1 else 34)
    DeviceMemory.here = classmethod(lambda cls, _: cls.of_total("cpu", room))  # pyright: ignore


def test_recomputation_is_chosen_by_the_device_with_least_room(tiny: TinyRun, forks: ForkServerContext):
    ranks = start_ranks(forks, tiny, *SHORT, "--model.recompute=auto", disturb=fill_a_device)
    assert ranks.join() == (2, 2), ranks.said()
    (complaint,) = ranks.complaints()
    assert "one step needs" in complaint and "2.4e-05 GiB of this process's 3.1e-05 may be filled" in complaint
    assert "2 processes share the machine's memory" in complaint


def die_in_the_update(rank: int) -> None:
    """Rank 1 is killed in the middle of its second step."""
    from ratoon.trainer import Trainer

    step, calls = Trainer.step, []

    def killed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(rank)
        if rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    Trainer.step = killed


def hang_before_the_update(rank: int) -> None:
    import time

    from ratoon.loop import synchronous

    if rank == 1:
        synchronous.attach_advantages = lambda *_, **__: time.sleep(1000)  # pyright: ignore


@pytest.mark.parametrize(
    ("disturb", "limit_s", "statuses"),
    sampled((hang_before_the_update, 10.0, (1, None)), (die_in_the_update, 100.0, (1, -signal.SIGKILL))),
)
def test_a_rank_that_dies_or_hangs_ends_the_run_by_name(
    tiny: TinyRun,
    forks: ForkServerContext,
    disturb: Callable[[int], None],
    limit_s: float,
    statuses: tuple[int, int | None],
):
    limits = (f"--{key}=9" for key in ("reward.timeout_s", "reward.start_timeout_s", "rollout.timeout_s"))
    ranks = start_ranks(forks, tiny, *SHORT, *limits, f"--trainer.rank_timeout_s={limit_s}", disturb=disturb)
    ranks.processes[0].join(timeout=100)
    if statuses[1] is None:
        ranks.processes[1].kill()  # as the launcher does
    got = ranks.join()
    assert got[0] == statuses[0], ranks.said()
    (complaint,) = ranks.complaints()
    happened = "was lost" if statuses[1] else f"did not come within {limit_s:g} s (trainer.rank_timeout_s)"
    assert f"train: rank 1 {happened}: rank 0 of 2 waited for it in an exchange" in complaint
    assert "Traceback" in (tiny.run_dir / "run.log").read_text()


def stop_rank_one(rank: int) -> None:
    """Told on one rank alone, as it happens where a scheduler signals one host first."""
    from ratoon.trainer import Trainer

    step = Trainer.step

    def told(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args, **kwargs)

    Trainer.step = told


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(tiny: TinyRun, forks: ForkServerContext, undisturbed: Path):
    ranks = start_ranks(forks, tiny, disturb=stop_rank_one)
    assert ranks.join() == (143, 143), ranks.said()
    assert sorted((tiny.run_dir / "checkpoints").iterdir())[-1].name == "step-000001"
    resumed = start_ranks(forks, tiny)
    assert resumed.join() == (0, 0), resumed.said()
    assert_same_run(tiny.run_dir, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["ratoon", "torchrun"])
def test_the_command_and_torchrun_start_the_ranks(tiny: TinyRun, undisturbed: Path, launcher: str):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start = torchrun if launcher == "torchrun" else []
    asked = [] if launcher == "torchrun" else ["--trainer.num_processes=2"]
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [sys.executable, *start, "-m", "ratoon.cli.main", "train", str(tiny.recipe), *asked],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Run tiny complete: 6 of 6 steps") == 1
    assert "ratoon train: " not in finished.stderr
    assert_same_run(tiny.run_dir, undisturbed)


@pytest.mark.full
def test_what_is_wrong_is_told_once_by_the_ranks_that_the_command_starts(tiny: TinyRun):
    root = Path(__file__).parents[2]
    asked = ["--trainer.num_processes=2", "--data.source=absent.jsonl"]
    finished = subprocess.run(
        [sys.executable, "-m", "ratoon.cli.main", "train", str(tiny.recipe), *asked],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 2
    assert [line for line in finished.stderr.splitlines() if "absent.jsonl" in line] == finished.stderr.splitlines()


@pytest.mark.full
def test_a_rank_that_is_killed_is_told_of_once_by_the_command(tiny: TinyRun):
    """The rank that lost it has the same news, and leaves it to the command."""
    root = Path(__file__).parents[2]
    started = subprocess.Popen(
        [sys.executable, "-m", "ratoon.cli.main", "train", str(tiny.recipe), "--trainer.num_processes=2"],
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics, deadline = tiny.run_dir / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and '"phase": "sft"' in metrics.read_text()):
        assert started.poll() is None and time.monotonic() < deadline, "it trains"
        time.sleep(0.01)
    (other,) = [child for child in psutil.Process(started.pid).children() if child.environ().get("RANK") == "1"]
    other.kill()
    _, error = started.communicate(timeout=200)
    assert started.returncode == 1
    complaints = [line for line in error.splitlines() if line.startswith("ratoon train: ")]
    assert complaints == error.splitlines() and len(complaints) == 1, error
    assert "rank 1 of 2 was ended by SIGKILL" in complaints[0]
    assert "Traceback" in (tiny.run_dir / "run.log").read_text()
