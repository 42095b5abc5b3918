"""The planner's bench: its peer is Karmarkar-Karp, and its rows say what plans say."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.bench.planner import MAX_SEQUENCE_RANKS, PlannerCase, bench_planner, karmarkar_karp
from ratoon.bench.rows import BenchRow
from ratoon.cli.main import main


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_karmarkar_karp_deals_every_item_once_and_well(sizes: list[int], num_parts: int):
    """Within 4/3 - 1/(3 parts) of the best heaviest part; the method's bound is lower."""
    parts = karmarkar_karp(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    best = min(
        max(sum(size for size, at in zip(sizes, where, strict=True) if at == part) for part in range(num_parts))
        for where in itertools.product(range(num_parts), repeat=len(sizes))
    )
    heaviest = max(sum(sizes[item] for item in part) for part in parts)
    assert best <= heaviest <= best * (4 / 3 - 1 / (3 * num_parts)) + 1e-9


def test_karmarkar_karp_by_hand():
    """Karmarkar and Karp's differences of 8, 7, 6, 5, 4 are 1, 1, then 4 - 1 - 1 = 2: sums 16 and 14."""
    sums = sorted(sum((8, 7, 6, 5, 4)[item] for item in part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


def figure(row: BenchRow, name: str) -> float:
    value = row.figures[name]
    assert isinstance(value, float | int)
    return value


def test_rows_name_both_ways_of_meeting_and_the_peers():
    case = PlannerCase(groups=40, N=4, ranks=4, max_rows=32_768)
    rows = bench_planner(case, command="ratoon bench planner")
    assert [(row.impl, row.layout, row.peer) for row in rows] == [
        ("ratoon, ranks meet every step", "shared", False),
        ("ratoon, ranks meet every microbatch", "shared", False),
        ("karmarkar-karp on rows", "shared", True),
        ("karmarkar-karp on lengths", "replicated", True),
    ]
    predicted, lockstep, num_rows = (
        [figure(row, name) for row in rows] for name in ("of_lower_bound", "lockstep_s", "num_rows")
    )
    assert min(predicted) >= 1
    assert predicted[0] <= predicted[2]
    assert lockstep[1] <= lockstep[0]
    assert num_rows[3] > num_rows[2]
    many = bench_planner(PlannerCase(groups=4, N=2, ranks=MAX_SEQUENCE_RANKS + 1, max_rows=32_768), command="")
    assert len(many) == 3


def test_the_command_appends_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "planner.jsonl"
    arguments = ["--groups", "20", "--ranks", "2,3", "--results", str(results)]
    assert main(["bench", "planner", *arguments]) == 0
    assert "karmarkar-karp on lengths" in capsys.readouterr().out
    assert [json.loads(line)["case"]["ranks"] for line in results.read_text().splitlines()] == [2] * 4 + [3] * 4


@pytest.mark.parametrize("ranks", ["0", "x", "2,", "-1"])
def test_numbers_of_ranks_are_positive(ranks: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "planner", f"--ranks={ranks}"])
    assert exit_.value.code == 2
    assert "--ranks: must be" in capsys.readouterr().err


def test_a_response_over_the_budget_is_one_paragraph(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "planner", "--groups", "5", "--max-rows", "100", "--ranks", "2"]) == 2
    assert "planner.max_rows_per_microbatch=100" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", ".", "missing/../file/below.jsonl"])
def test_results_that_cannot_be_written_are_refused_before_anything_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["bench", "planner", "--ranks", "2", "--groups", "3", f"--results={name}"]) == 2
    shown = capsys.readouterr()
    assert "--results: rows cannot be appended to" in shown.err and not shown.out


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path):
    results = tmp_path / "planner.jsonl"
    results.write_text('{"bench": "planner", "case": {"gro')
    assert main(["bench", "planner", "--ranks", "2", "--groups", "3", "--results", str(results)]) == 0
    cut_off, *rows = results.read_text().splitlines()
    assert cut_off == '{"bench": "planner", "case": {"gro' and len(rows) == 4
    assert all(json.loads(row)["bench"] == "planner" for row in rows)


@pytest.mark.parametrize(
    ("option", "number"),
    [("--groups", "99999999999"), ("--group-size", "99999999"), ("--ranks", "8,1000000"), ("--max-rows", "9" * 20)],
)
def test_sizes_that_would_take_all_memory_are_refused(option: str, number: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "planner", option, number])
    assert ended.value.code == 2
    assert "must be at most" in capsys.readouterr().err


def test_so_are_too_many_responses_together(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "planner", "--groups", "100000", "--group-size", "100"]) == 2
    assert "at most 1,048,576 responses, got 10,000,000" in capsys.readouterr().err
