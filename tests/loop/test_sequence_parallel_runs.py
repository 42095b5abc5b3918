"""`ratoon train` on ranks that hold each microbatch together, against one process."""

import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from tests.loop.several_ranks import start_ranks
from tests.loop.test_several_ranks import (
    SHORT,
    assert_same_run,
    assert_same_run_without_evaluations,
    die_in_the_update,
    metrics_rows,
    run_of_one,
)
from tests.loop.tiny_run import VARIANTS, Outcome, TinyRun

TOGETHER = "--trainer.sequence_parallel=2"
CASES: dict[str, tuple[str, ...]] = {
    "cut, with a reference": ("--trainer.sharding=full", *VARIANTS["reference model"], "--evaluation.every_steps=2"),
    "whole, adapters": ("--trainer.sharding=none", *VARIANTS["adapters and their reference"]),
    "whole, with a reference": ("--trainer.sharding=none", *VARIANTS["reference model"]),
    "a penalty in the reward": VARIANTS["a penalty in the reward"],
    "dynamic sampling": VARIANTS["dynamic sampling"],
    "small microbatches": ("--planner.max_rows_per_microbatch=9", "--model.recompute=full"),
    "compiled layers": ("--model.compile=layers", "--trainer.sharding=full", "--model.recompute=selective"),
    "kept tokens and a correction": ("--rollout.top_k=4", "--algorithm.mismatch_correction=token-tis"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in list(CASES)[:1] else pytest.mark.full) for c in CASES]
)
def test_two_ranks_together_run_as_one(
    tiny: TinyRun, forks: ForkServerContext, command: Callable[[list[str]], Outcome], tmp_path: Path, case: str
):
    ranks = start_ranks(forks, tiny, *SHORT, TOGETHER, *CASES[case])
    expected = run_of_one(tmp_path, command, *SHORT, *CASES[case])
    assert ranks.join() == (0, 0), ranks.said()
    assert not ranks.complaints()
    assert_same_run(tiny.run_dir, expected)
    assert "2 processes train together: 1 data rank x 2 sequence ranks; each holds" in ranks.said()[0]
    mine, others = (metrics_rows(run_dir, "train") for run_dir in (tiny.run_dir, expected))
    assert [row["num_microbatches"] for row in mine] == [row["num_microbatches"] for row in others]
    assert all(row["memory_predicted_gib"] for row in mine)


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_four_ranks_two_by_two(
    tiny: TinyRun, forks: ForkServerContext, command: Callable[[list[str]], Outcome], tmp_path: Path, sharding: str
):
    """One prompt a step, so that a data rank has a part of its responses or none."""
    settings = ("--rollout.prompts_per_step=1", "--algorithm.kl_coefficient=0.1")
    ranks = start_ranks(forks, tiny, *SHORT, TOGETHER, f"--trainer.sharding={sharding}", *settings, count=4)
    expected = run_of_one(tmp_path, command, *SHORT, *settings)
    assert ranks.join() == (0, 0, 0, 0), ranks.said()
    assert_same_run(tiny.run_dir, expected)
    assert "4 processes train together: 2 data ranks x 2 sequence ranks; " in ranks.said()[0]


@pytest.mark.full
def test_another_degree_goes_on(tiny: TinyRun, forks: ForkServerContext, undisturbed: Path):
    """Checkpoints do not know it, and the recipe's key may change."""
    together = start_ranks(forks, tiny, TOGETHER, "--trainer.num_steps=2")
    assert together.join() == (0, 0), together.said()
    apart = start_ranks(forks, tiny, "--trainer.num_steps=4")
    assert apart.join() == (0, 0), apart.said()
    assert "resuming after step 2" in apart.said()[0]
    assert tiny.train().status == 0
    assert_same_run_without_evaluations(tiny.run_dir, undisturbed)


@pytest.mark.parametrize(
    ("degree", "settings", "words"),
    [
        (3, (), "does not divide the 2 processes of this run nor the 2 attention heads"),
        (4, (), "2 heads it can be 1, 2"),
        (
            2,
            ("--model.fresh.num_heads=3",),
            "does not divide the 3 attention heads of the model, which are shared out evenly; with 2 processes and "
            "3 heads it can be 1",
        ),
    ],
)
def test_a_degree_that_does_not_work_is_told_once(
    tiny: TinyRun, forks: ForkServerContext, degree: int, settings: tuple[str, ...], words: str
):
    ranks = start_ranks(forks, tiny, *SHORT, f"--trainer.sequence_parallel={degree}", *settings)
    assert ranks.join() == (2, 2), ranks.said()
    (complaint,) = ranks.complaints()
    assert f"trainer.sequence_parallel = {degree}" in complaint and words in complaint
    assert sum(text.count("\n") for text in ranks.said()) == 1, ranks.said()


def test_a_rank_that_dies_ends_the_others_by_name(tiny: TinyRun, forks: ForkServerContext):
    ranks = start_ranks(forks, tiny, *SHORT, TOGETHER, "--trainer.sharding=none", disturb=die_in_the_update)
    assert ranks.join() == (1, -signal.SIGKILL), ranks.said()
    (complaint,) = ranks.complaints()
    assert "train: rank 1 was lost: rank 0 of 2 that hold microbatches together" in complaint


def test_one_process_shares_with_nobody(tiny: TinyRun):
    for arguments in ((TOGETHER,), ("--trainer.sequence_parallel=0",)):
        outcome = tiny.train(*arguments)
        assert outcome.status == 2
        assert "sequence_parallel" in outcome.err
        assert outcome.err.count("\n") == 1
    assert not tiny.run_dir.exists()
