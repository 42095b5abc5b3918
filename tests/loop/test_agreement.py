"""In every step of a run, the trainer gives the drawn tokens the log-probs that the engine drew them with.

The two sides meet in the loop only: temperature, truncation, weights and versions could each reach one of them alone.
"""

from pathlib import Path

import pytest
from tests.loop.tiny_run import TinyRun, metrics_rows

CASES = {
    "plain": (),
    "sharp and truncated": ("--rollout.temperature=0.5", "--rollout.top_p=0.9", "--rollout.top_k=5"),
    "several updates and no shared prompts": (
        "--algorithm.num_minibatches=2", "--planner.share_prompts=false", "--rollout.temperature=1.7",
    ),
    "adapters and their reference": (
        "--model.lora.rank=2", "--algorithm.kl_coefficient=0.1", "--rollout.temperature=0.7",
    ),
    "hardly any learning": ("--trainer.learning_rate=1e-30", "--rollout.temperature=0.7"),
}  # fmt: skip
SAMPLED = ("sharp and truncated", "several updates and no shared prompts", "hardly any learning")


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return metrics_rows(run_dir, "train")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SAMPLED else pytest.mark.full) for c in CASES])
def test_engine_and_trainer_agree_at_every_step(tiny: TinyRun, case: str):
    """TRL#4159 (temperature on one side), TRL#6789, verl#6240 (truncation on one side), TRL#5312 (stale weights), and
    open-instruct#1473: the gap grew from step to step, at learning rate 0 too."""
    outcome = tiny.train(*CASES[case])
    assert (outcome.status, outcome.err) == (0, "")
    gaps = [row["mismatch_max_abs"] for row in rows_of(tiny.run_dir)]
    assert len(gaps) == 6
    assert max(gaps) < 2e-5


def test_share_prompts_acts_and_the_dedup_ratio_shows_it(tiny: TinyRun):
    """A flag for shared prompts that has no effect: verl's `use_prefix_grouper` from 0.8 on. Here each row of metrics
    has the ratio of logical tokens to those computed; the same draws, so the same loss, at another cost."""
    assert tiny.train("--trainer.num_steps=2").status == 0
    shared = rows_of(tiny.run_dir)
    assert tiny.train("--trainer.num_steps=2", "--planner.share_prompts=false", "--fresh").status == 0
    repeated = rows_of(tiny.run_dir)
    for ours, theirs in zip(shared, repeated, strict=True):
        assert ours["num_logical_tokens"] == theirs["num_logical_tokens"] == theirs["num_rows"]
        assert theirs["dedup_ratio"] == 1
        assert ours["dedup_ratio"] > 1.2
        assert ours["dedup_ratio"] == pytest.approx(ours["num_logical_tokens"] / ours["num_rows"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
