"""`ratoon bench prefix-once`: its rows, and what it says of a kept prompt that loses gradients."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratoon.bench import prefix_once
from ratoon.bench.prefix_once import CASES, SLICE_GAP, bench_prefix_once, planned_parts
from ratoon.cli.main import main
from ratoon.models import KeptPrompt

torch.set_num_threads(1)


def test_rows_have_the_names_of_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "results" / "rows.jsonl"
    assert main(["bench", "prefix-once", "--cases", "tiny", "--budget-ms", "1", "--results", str(results)]) == 0
    rows = {row["way"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert list(rows) == ["fits", "kept", "repeated"]
    case = CASES["tiny"]
    for way, row in rows.items():
        assert row["bench"] == "prefix-once" and row["peer"] is False and row["layout"] == "shared"
        assert row["case"]["N"] == (case.fits if way == "fits" else case.N)
        assert 0 < row["step_s"] <= row["step_max_s"]
        assert {"device", "versions", "commit", "date", "command", "kernels", "peak_gib", "timing"} <= row.keys()
    assert [row["microbatches"] for row in rows.values()] == [1, 3, 3]
    assert [row["repeats"] for row in rows.values()] == [2, 2, 1]
    fits, kept, repeated = rows.values()
    assert fits["dedup_ratio"] == 3 * 76 / (57 + 3 * 19)
    assert kept["dedup_ratio"] == 7 * 76 / (57 + 7 * 19)
    assert repeated["dedup_ratio"] == 7 * 76 / (3 * 57 + 7 * 19)
    ratio = kept["useful_tflops_per_s"] / fits["useful_tflops_per_s"]
    assert kept["time_over_predicted"] == pytest.approx(1 / ratio)
    assert kept["time_over_predicted"] == pytest.approx(kept["step_s"] / kept["predicted_s"])
    assert kept["repeated_step_s"] == repeated["step_s"]
    # The same work for both ways of the large group, which is that of its own shared layout.
    flops = [row["useful_tflops_per_s"] * row["step_s"] for row in (kept, repeated)]
    assert flops[0] == pytest.approx(flops[1])
    assert kept["slice_gradient_gap"] < 1e-6 and kept["full_size_gradient_gap"] < 1e-4
    assert "times the" in capsys.readouterr().out


def lost(self: KeptPrompt) -> None:
    """What reached the prompt is forgotten."""
    for _, leaf in self._pairs:
        leaf.grad = None


def of_the_last(self: KeptPrompt) -> None:
    """Each microbatch's gradients take the place of those before."""
    self._sums = [None] * len(self._pairs)
    RIGHT(self)


def of_keys_alone(self: KeptPrompt) -> None:
    """The first token of every response says nothing to the prompt."""
    self._pairs[-1][1].grad = None
    RIGHT(self)


RIGHT = KeptPrompt.add_gradients


@pytest.mark.parametrize("wrong", [lost, of_the_last, of_keys_alone])
def test_a_red_check_prints_no_speed(
    wrong: Callable[[KeptPrompt], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(KeptPrompt, "add_gradients", wrong)
    results = tmp_path / "rows.jsonl"
    arguments = ["bench", "prefix-once", "--cases", "tiny", "--budget-ms", "1", "--results", str(results)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "WRONG, no speed is reported: on a slice" in shown and "TFLOP/s" not in shown
    assert not results.exists()


def test_full_size_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch):
    """Where the slice lets all through."""
    monkeypatch.setattr(KeptPrompt, "add_gradients", lost)
    monkeypatch.setattr(prefix_once, "SLICE_GAP", dict.fromkeys(SLICE_GAP, 1e9))
    said: list[str] = []
    outcome = bench_prefix_once(cases=["tiny"], budget_s=0.001, command="", say=said.append)
    assert not outcome.rows
    (failed,) = outcome.failed
    assert "at full size" in failed.reason
    assert not any("TFLOP/s" in line for line in said)


def test_microbatches_are_those_that_the_planner_makes():
    large = CASES["1.7b-p16384-r4096-n64"]
    assert [len(part) for part in planned_parts(large)] == [large.fits] * 8
    assert sorted(response for part in planned_parts(large) for response in part) == list(range(64))
    assert [len(part) for part in planned_parts(CASES["tiny"])] == [3, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--cases", "huge"], "no such large group: huge; there are 1.7b-p16384-r4096-n64, tiny")],
)
def test_wrong_choices_are_answered(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "prefix-once", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not too small")
def test_a_cpu_is_too_small(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "prefix-once", "--cases", "1.7b-p16384-r4096-n64"]) == 2
    assert "too large for a CPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs_on_the_gpu(monkeypatch: pytest.MonkeyPatch):
    """The tiny case, compiled too."""
    compiled = replace(CASES["tiny"], variant="auto/none/layers")
    monkeypatch.setitem(CASES, "tiny", compiled)
    outcome = bench_prefix_once(cases=["tiny"], budget_s=0.01, command="")
    assert not outcome.failed
    assert [row.figures["way"] for row in outcome.rows] == ["fits", "kept", "repeated"]
