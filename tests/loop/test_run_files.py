"""Files of a run's folder that were lost, or are not what the run made them."""

import pytest
from tests.loop.tiny_run import TinyRun, metrics_rows


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_lost_metrics_are_warned_of_and_the_run_goes_on(tiny: TinyRun, how: str):
    assert "lacks the rows" not in tiny.train("--trainer.num_steps=2").out
    metrics = tiny.run_dir / "metrics.jsonl"
    metrics.unlink() if how == "removed" else metrics.write_text("")
    outcome = tiny.train("--trainer.num_steps=3")
    assert (outcome.status, outcome.err) == (0, "")
    warning = "metrics.jsonl lacks the rows of 2 of the 2 steps done, up to step 2"
    assert outcome.out.count(warning) == 1
    assert (tiny.run_dir / "run.log").read_text().count(warning) == 1
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "train")] == [3]


def test_rows_lost_in_the_middle_are_warned_of(tiny: TinyRun):
    tiny.train("--trainer.num_steps=3")
    metrics = tiny.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"step": 2, "phase": "train"' not in line))
    assert "lacks the rows of 1 of the 3 steps done, up to step 2" in tiny.train("--trainer.num_steps=3").out
