"""A run's sinks, from the command line on: begun, killed and resumed, they hold what metrics.jsonl holds."""

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from tests.loop.run_process import kill, start, wait_for
from tests.loop.tiny_run import SCORES_PER_STEP, TinyRun, metrics_rows, traces

from ratoon.metrics import read_metrics

SINK = "--logging.sinks=['tensorboard']"


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_board_equals_file(run_dir: Path) -> None:
    wanted: dict[str, list[tuple[int, Any]]] = {}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        for name, value in row.values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                number = pytest.approx(float(value), rel=1e-6, nan_ok=True)
                wanted.setdefault(f"{row.phase}/{name}", []).append((row.step, number))
    assert {"sft/loss", "train/loss", "evaluate/reward_mean"} <= wanted.keys()
    assert scalars(run_dir) == wanted


def test_killed_and_resumed_run_shows_each_step_once(tiny: TinyRun, undisturbed: Path, forks: ForkServerContext):
    process = start(forks, tiny, SINK)
    wait_for(lambda: (tiny.run_dir / "rollouts" / "step-000003.parquet").exists(), process)
    assert kill(process)
    outcome = tiny.train(SINK)
    assert (outcome.status, outcome.err) == (0, "")
    assert "warning" not in outcome.out
    assert traces(tiny.run_dir) == traces(undisturbed)
    assert_board_equals_file(tiny.run_dir)


def test_sinks_may_be_added_and_taken_away_on_resume(tiny: TinyRun, undisturbed: Path):
    tiny.trigger(after_scores=3 + 2 * SCORES_PER_STEP + 3, action="interrupt")
    assert tiny.train().status == 130
    tiny.trigger(after_scores=SCORES_PER_STEP + 3, action="interrupt")
    assert tiny.train(SINK, "--logging.timeout_s=60").status == 130
    assert_board_equals_file(tiny.run_dir)
    assert tiny.train().status == 0
    assert traces(tiny.run_dir) == traces(undisturbed)


def test_failing_sink_is_a_warning_on_the_page(tiny: TinyRun, undisturbed: Path):
    assert tiny.train("--trainer.num_steps=0").status == 0
    (tiny.run_dir / "tensorboard").write_text("a file where the folder should be")
    outcome = tiny.train(SINK)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.count("tensorboard failed (FileExistsError") == 1
    found, wanted = traces(tiny.run_dir), traces(undisturbed)
    assert found["files"] == wanted["files"]


def test_missing_package_is_refused_before_the_model_loads(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.metrics.sinks.find_spec", lambda _: None)
    refused = tiny.train("--logging.sinks=['wandb']")
    assert refused.status == 2
    assert 'pip install -e ".[wandb]"' in refused.err
    assert not tiny.run_dir.exists()


def test_complete_run_starts_no_sink(tiny: TinyRun):
    assert tiny.train(SINK, "--trainer.num_steps=1").status == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in (tiny.run_dir / "tensorboard").iterdir())
    assert "is complete" in tiny.train(SINK, "--trainer.num_steps=1").out
    assert sorted((path, path.stat().st_mtime_ns) for path in (tiny.run_dir / "tensorboard").iterdir()) == before
    assert json.loads((tiny.run_dir / "sinks" / "run.json").read_text())["run_name"] == "tiny"
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "train")] == [1]
