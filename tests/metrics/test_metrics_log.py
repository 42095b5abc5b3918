"""metrics.jsonl: always valid JSON, no step twice, nothing lost but a line that a crash cut."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.metrics import MetricsLog, MetricsRow, read_metrics
from ratoon.metrics.rows import row_from_json, row_to_json
from ratoon.types import UserError


def refuse_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict_rows(path: Path) -> list[dict]:
    """Rows as a reader sees them that accepts nothing beyond the JSON standard."""
    return [json.loads(line, parse_constant=refuse_constants) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [row.step for row in read_metrics(path)]


def test_each_row_can_be_read_before_the_log_is_closed(tmp_path: Path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.log(1, "grpo", reward_mean=0.25, is_final=False, note="a [b]\nc", tokens=np.int64(7), staleness=None)
    (row,) = strict_rows(tmp_path / "run" / "metrics.jsonl")
    assert row.pop("unix_s") > 1.7e9
    assert row == {
        "step": 1,
        "phase": "grpo",
        "reward_mean": 0.25,
        "is_final": False,
        "note": "a [b]\nc",
        "tokens": 7,
        "staleness": None,
    }


def test_not_finite_values_are_null_and_named(tmp_path: Path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.log(1, "grpo", loss=math.nan, grad_norm=np.float32("inf"), low=-math.inf, reward_mean=1.0)
    (row,) = strict_rows(tmp_path / "m.jsonl")
    assert (row["loss"], row["grad_norm"], row["low"], row["reward_mean"]) == (None, None, None, 1.0)
    assert row["not_finite"] == {"loss": "nan", "grad_norm": "inf", "low": "-inf"}
    (read,) = read_metrics(tmp_path / "m.jsonl")
    assert [repr(read.values[name]) for name in ("loss", "grad_norm", "low")] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, np.zeros(2), object()])
def test_a_value_that_is_no_scalar_is_refused_by_name(tmp_path: Path, value: object):
    with MetricsLog(tmp_path / "m.jsonl") as log, pytest.raises(ValueError, match="metric 'loss'"):
        log.log(1, "grpo", loss=value)
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_the_rows_own_keys_are_refused(tmp_path: Path):
    with MetricsLog(tmp_path / "m.jsonl") as log, pytest.raises(ValueError, match="'unix_s'"):
        log.log(1, "grpo", unix_s=3.0)


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())


@given(step=st.integers(0, 10**9), rows=st.dictionaries(st.from_regex(r"[a-z]{3,9}_x", fullmatch=True), values))
@settings(max_examples=100, deadline=None)
def test_any_row_survives_the_file(step: int, rows: dict):
    written = MetricsRow(step=step, phase="grpo", unix_s=1.5, values=rows)
    line = row_to_json(written)
    assert "\n" not in line
    json.loads(line, parse_constant=refuse_constants)
    read = row_from_json(line)
    assert (read.step, read.phase, read.unix_s) == (step, "grpo", 1.5)
    assert repr(dict(read.values)) == repr(rows)  # repr: NaN is unequal to itself, True is equal to 1


@pytest.mark.parametrize("kept_bytes", [1, 10, 25, 39])
def test_a_cut_last_line_is_removed_and_said(tmp_path: Path, kept_bytes: int):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.log(1, "grpo", reward_mean=0.5)
        log.log(2, "grpo", reward_mean=0.75)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept_bytes])
    assert steps(path) == [1], "reading a file in use leaves the unfinished line out"
    said: list[str] = []
    with MetricsLog(path, warn=said.append) as log:
        assert len(said) == 1 and str(path) in said[0] and f"{kept_bytes} characters" in said[0]
        log.log(2, "grpo", reward_mean=0.8)
    assert [row["step"] for row in strict_rows(path)] == [1, 2]


def test_a_cut_inside_a_character_is_repaired_too(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "phase": "grpo", "unix_s": 1.0}\n{"step": 2, "note": "\xe2\x86')
    said: list[str] = []
    MetricsLog(path, warn=said.append).close()
    assert said and steps(path) == [1]


def test_a_whole_file_is_opened_without_a_word_and_unchanged(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.log(1, "grpo", reward_mean=0.5)
    before, said = path.read_bytes(), []
    MetricsLog(path, warn=said.append).close()
    assert path.read_bytes() == before and not said


def test_damage_in_the_middle_names_file_and_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "phase": "grpo"}\nnonsense\n{"step": 2, "phase": "grpo"}\n')
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        MetricsLog(path)
    with pytest.raises(UserError, match=r"does not exist"):
        read_metrics(tmp_path / "absent.jsonl")


def test_no_step_stands_twice_after_resuming_from_an_older_checkpoint(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.log(700, "sft", loss=1.0)
        log.log(0, "evaluate", reward_mean=0.4)
        for step in range(1, 8):
            log.log(step, "grpo", reward_mean=step / 10, loss=math.nan)
        log.log(7, "evaluate", reward_mean=0.6)
    with MetricsLog(path) as log:
        assert log.truncate_after(5) == 3
        for step in range(6, 9):
            log.log(step, "grpo", reward_mean=0.9)
    rows = read_metrics(path)
    assert [row.step for row in rows if row.phase == "grpo"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(row.step, row.phase) for row in rows[:2]] == [(700, "sft"), (0, "evaluate")], "the warm start stays"
    assert repr(rows[2].values["loss"]) == "nan", "rewriting the file keeps what JSON cannot hold"
    assert [path.name for path in tmp_path.iterdir()] == ["m.jsonl"]
    strict_rows(path)


def test_a_negative_step_removes_everything(tmp_path: Path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.log(3, "sft", loss=1.0)
        log.log(0, "evaluate", reward_mean=1.0)
        assert log.truncate_after(-1) == 2
        log.log(1, "sft", loss=2.0)
    assert steps(tmp_path / "m.jsonl") == [1]


def test_find_gives_the_last_row_of_a_phase(tmp_path: Path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        assert log.find("evaluate") is None
        log.log(0, "evaluate", reward_mean=0.1)
        log.log(1, "grpo", reward_mean=0.5)
        log.log(1, "evaluate", reward_mean=0.2)
        last, first = log.find("evaluate"), log.find("evaluate", step=0)
        assert last is not None and last.values["reward_mean"] == 0.2
        assert first is not None and first.values["reward_mean"] == 0.1
        assert log.find("evaluate", step=2) is None


def test_other_ranks_measure_without_a_file(tmp_path: Path):
    with MetricsLog(None) as log:
        with log.span("update"):
            pass
        row = log.log(1, "grpo", loss=0.5)
        assert log.truncate_after(0) == 0 and log.find("grpo") is None
    assert set(row.values) == {"loss", "seconds_in_update"}
    assert not list(tmp_path.iterdir())


def test_every_second_stands_in_one_row_and_outlives_the_process(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3):
            for phase in ("generate", "update"):
                with log.span(phase):
                    sum(range(20_000))
            log.log(step, "grpo", loss=0.0)
        first_total = log.total_seconds
    rows = read_metrics(path)
    for phase in ("generate", "update"):
        in_rows = [row.seconds_by_phase[phase] for row in rows]
        assert all(seconds > 0 for seconds in in_rows)
        assert sum(in_rows) == pytest.approx(first_total[phase], abs=1e-5)
    with MetricsLog(path) as log:
        assert log.total_seconds == pytest.approx(first_total, abs=1e-5)
        assert log.log(4, "grpo").values == {}, "past seconds are not written again"
        log.truncate_after(1)
        assert log.total_seconds == pytest.approx(rows[0].seconds_by_phase, abs=1e-5)


def test_a_value_named_like_a_span_is_refused(tmp_path: Path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        with log.span("update"):
            pass
        with pytest.raises(ValueError, match="seconds_in_update"):
            log.log(1, "grpo", seconds_in_update=3.0)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "phase": "train", "unix_s": []}',
        '{"step": 1, "phase": "train", "not_finite": []}',
        '{"step": 1, "phase": "train", "not_finite": {"loss": [1]}}',
        '{"step": 1, "phase": "train", "loss": {"a": 1}}',
        '{"step": 1, "phase": ["train"]}',
        '{"step": 1, "phase": "train", "seconds_in_update": 1' + "0" * 400 + "}",
        '{"step": 1' + "0" * 5000 + ', "phase": "train"}',
        "[" * 100_000,
        "1",
    ],
    ids=lambda line: line[:60],
)
def test_json_that_is_no_row_is_named_by_line(tmp_path: Path, line: str):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "phase": "grpo"}\n' + line + "\n")
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        read_metrics(path)


@pytest.mark.parametrize("how", ["removed", "replaced", "folder moved", "folder moved, and made again"])
def test_file_that_is_no_longer_there_ends_the_run(tmp_path: Path, how: str):
    """Rows of an open file that has no name any more are lost without a word."""
    folder = tmp_path / "run"
    with MetricsLog(folder / "m.jsonl") as log:
        log.log(1, "grpo", loss=0.5)
        if how == "removed":
            (folder / "m.jsonl").unlink()
        elif how == "replaced":  # as editors do
            shutil.copy(folder / "m.jsonl", folder / "other")
            (folder / "other").rename(folder / "m.jsonl")
        else:
            folder.rename(tmp_path / "moved")
        if how == "folder moved, and made again":
            folder.mkdir()
            (folder / "m.jsonl").write_text("")
        with pytest.raises(UserError, match=r"m\.jsonl was removed, moved or replaced"):
            log.log(2, "grpo", loss=0.5)
