"""`ratoon bench memory`: its rows, and what it says of a prediction that is out. A GPU measures in tests/planner."""

import json
from pathlib import Path

import pytest
import torch

from ratoon.bench import memory
from ratoon.bench.memory import CASES, bench_memory
from ratoon.cli.main import main

GIB = 1 << 30


def measured_as(monkeypatch: pytest.MonkeyPatch, predicted: dict[str, int], measured: dict[str, int]) -> None:
    """Every case comes to these; no GPU is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    monkeypatch.setattr(memory, "measure", lambda case: (predicted, measured))
    monkeypatch.setattr("ratoon.bench.rows.device_name", lambda: "a GPU")


def test_a_row_has_every_phase_predicted_and_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    measured_as(monkeypatch, {"held": 2 * GIB, "backward": 9 * GIB}, {"held": 2 * GIB, "backward": 10 * GIB})
    results = tmp_path / "rows.jsonl"
    outcome = bench_memory(cases=["0.6b-none"], command="ratoon bench memory", results=results, say=lambda line: None)
    (row,) = map(json.loads, results.read_text().splitlines())
    assert not outcome.failed
    assert row["bench"] == "memory" and row["layout"] == "shared" and row["peer"] is False
    assert row["case"] == {"model": "Qwen3-0.6B (20 of 28 layers)", "P": 2048, "R": 512, "N": 16, "groups": 1}
    assert (row["recompute"], row["compile"]) == ("none", False)
    assert row["backward_predicted_gib"] == 9 and row["backward_measured_gib"] == 10
    assert row["backward_predicted_over_measured"] == 0.9 and row["held_predicted_over_measured"] == 1
    assert {"device", "versions", "commit", "date", "command"} <= row.keys()


def test_a_prediction_that_is_out_fails_and_keeps_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measured_as(monkeypatch, {"held": GIB, "backward": 8 * GIB}, {"held": GIB, "backward": 9 * GIB})
    results = tmp_path / "rows.jsonl"
    assert main(["bench", "memory", "--cases", "135m-none,0.6b-none", "--results", str(results)]) == 1
    assert len(results.read_text().splitlines()) == 2
    said = capsys.readouterr().out
    assert "FAILED: 135m-none: backward is out by more than 10%" in said and "0.889" in said


def test_without_a_gpu_it_says_what_predicts_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "memory", "--results", str(tmp_path / "rows.jsonl")]) == 2
    assert "ratoon plan" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()
    assert main(["bench", "memory", "--cases", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_cases_cover_each_recomputation_compiled_and_not():
    assert {(case.recompute, case.compile) for case in CASES.values()} >= {
        ("none", "none"), ("selective", "none"), ("full", "none"),
        ("none", "layers"), ("selective", "layers"), ("full", "layers"),
    }  # fmt: skip
