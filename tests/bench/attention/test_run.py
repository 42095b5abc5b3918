"""`ratoon bench attention`: what it writes, and what it does when something is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.bench.attention.inputs import padded_stand_in, varlen_stand_in

from ratoon.attention import available_impls
from ratoon.bench.attention import run
from ratoon.bench.attention.candidates import OUR_IMPLS, Candidate, Work
from ratoon.bench.attention.cases import CASES
from ratoon.bench.attention.peers import copied_keys, replicated_padded, replicated_varlen
from ratoon.cli.main import main

FAST = ["--budget-ms", "1"]


def stand_in_peers(name: str, work: Work) -> Candidate:
    match name:
        case "kv-copy-fa4":
            return copied_keys(name, work, varlen_stand_in)
        case "cudnn":
            return replicated_padded(name, work, padded_stand_in)
        case _:
            return replicated_varlen(name, work, varlen_stand_in)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "_RATE_BUDGET_S", 0.0)


def test_rows_have_the_names_of_the_design(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "make_peer", stand_in_peers)
    results = tmp_path / "results" / "attention.jsonl"
    arguments = ["bench", "attention", "--cases", "tiny-group,tiny-tree", "--impls", "auto,flash-cpu"]
    arguments += ["--peers", "fa4,fa2,kv-copy-fa4,cudnn", *FAST, "--results", str(results)]
    assert main(arguments) == 0
    rows = read_rows(results)
    assert len(rows) == 2 * 6
    always = ("bench", "case", "impl", "layout", "peer", "device", "versions", "commit", "date", "command")
    figures = ("fwd_ms", "bwd_ms", "useful_tflops_fwd", "useful_tflops_bwd", "matmul_tflops")
    more = ("fwd_of_matmul", "bwd_of_matmul", "fwd_p20_ms", "fwd_p80_ms", "bwd_p20_ms", "bwd_p80_ms", "max_error")
    more += ("rms_error", "peak_extra_gib", "copy_tb_per_s", "timing", "fwd_host_ms", "fwd_floor_ms", "case_name")
    for row in rows:
        assert set(always + figures + more) <= row.keys()
        assert row["bench"] == "attention"
        assert list(row["case"]) == ["P", "R", "N", "groups", "H", "Hkv", "D", "window"]
        case = CASES[row["case_name"]]
        assert row["case"] == case.key
        assert row["useful_tflops_fwd"] == pytest.approx(case.forward_flops / row["fwd_ms"] / 1e9)
        assert row["useful_tflops_bwd"] == pytest.approx(case.backward_flops / row["bwd_ms"] / 1e9)
        assert row["fwd_of_matmul"] == pytest.approx(row["useful_tflops_fwd"] / row["matmul_tflops"])
        assert row["fwd_p20_ms"] <= row["fwd_ms"] <= row["fwd_p80_ms"]
        assert 0 < row["rms_error"] < 1e-5
        assert row["peer"] == (row["impl"] not in OUR_IMPLS)
        assert row["layout"] == ("replicated" if row["impl"] in ("fa4", "fa2", "cudnn") else "shared")
    assert {row["kernels"] for row in rows if row["impl"] == "flash-cpu"} == {"forward flash-cpu, backward flash-cpu"}
    shown = capsys.readouterr().out
    assert shown.count("by FLOPs") == shown.count("by bytes") / 1 == 2 * 2
    table = shown.partition("\n\n")[2].splitlines()
    assert len(table) == 1 + len(rows)
    fa4_line = next(line for line in table if "tiny-tree" in line and "fa4 (peer)" in line and "kv" not in line)
    assert fa4_line.split()[-3] == "1.00"  # times itself


def test_ratios_compare_forward_and_backward_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "make_peer", stand_in_peers)
    rows = run.bench_attention(
        cases=["tiny-group"], impls=["reference"], peers=["fa2"], budget_s=0.0, command="", say=lambda _: None
    ).rows
    ours, peer = (replace(row, figures={**row.figures, "fwd_ms": fwd, "bwd_ms": bwd}) for row, fwd, bwd in zip(
        rows, (1.0, 3.0), (2.0, 6.0), strict=True
    ))  # fmt: skip
    from ratoon.bench.attention.tables import end_table

    _, ours_line, peer_line = end_table([ours, peer]).splitlines()
    assert ours_line.split()[-3:] == ["-", "3.00", "-"]
    assert peer_line.split()[-3:] == ["-", "1.00", "-"]


@pytest.mark.parametrize("is_peer", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_red_check_prints_no_speed(
    is_peer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The others are measured all the same, and the run as a whole has failed."""

    def spoil(candidate: Candidate) -> Candidate:
        return replace(candidate, forward=lambda: candidate.forward() * 1.01)

    right = run.make_ours
    monkeypatch.setattr(run, "make_peer", lambda name, work: spoil(stand_in_peers(name, work)))
    if not is_peer:
        monkeypatch.setattr(run, "make_peer", stand_in_peers)
        monkeypatch.setattr(
            run,
            "make_ours",
            lambda name, *rest: spoil(right(name, *rest)) if name == "flash-cpu" else right(name, *rest),
        )
    wrong = "fa2" if is_peer else "flash-cpu"
    results = tmp_path / "attention.jsonl"
    arguments = ["bench", "attention", "--cases", "tiny-group", "--impls", "flash-cpu,reference", "--peers", "fa2"]
    assert main([*arguments, *FAST, "--results", str(results)]) == 1
    assert wrong not in {row["impl"] for row in read_rows(results)}
    assert len(read_rows(results)) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if f"{wrong} (" in line or f"  {wrong} " in line]
    assert len(lines) == 2  # as it happens, and at the end
    for line in lines:
        assert "WRONG, no speed is reported: out: largest error" in line
        assert " ms" not in line


def test_a_killed_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = run.make_ours

    def interrupted(name: str, *rest) -> Candidate:
        if name == "reference":
            raise KeyboardInterrupt
        return right(name, *rest)

    monkeypatch.setattr(run, "make_ours", interrupted)
    results = tmp_path / "attention.jsonl"
    results.write_text('{"bench": "earlier"}\n')
    arguments = ["bench", "attention", "--cases", "tiny-group", "--impls", "flash-cpu,reference"]
    assert main([*arguments, *FAST, "--results", str(results)]) == 130
    assert [row.get("impl", row["bench"]) for row in read_rows(results)] == ["earlier", "flash-cpu"]


@pytest.mark.full
def test_what_cannot_run_is_listed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "attention.jsonl"
    arguments = ["bench", "attention", "--cases", "tiny-window,tiny-group", "--impls", "flash-cpu,flex-triton"]
    assert main([*arguments, "--peers", "fa4,cudnn", *FAST, "--results", str(results)]) == 0
    assert [(row["case_name"], row["impl"]) for row in read_rows(results)] == [("tiny-group", "flash-cpu")]
    ending = capsys.readouterr().out.partition("\n\n")[2]
    assert "not run: flash-cpu (tiny-window): impl='flash-cpu' cannot run this attention" in ending
    assert "not run: fa4 (peer) (tiny-window, tiny-group): needs a CUDA device" in ending
    assert "not run: flex-triton (tiny-window): impl='flex-triton' cannot run this attention" in ending


def raising(error: Exception) -> Callable:
    def make(*_: object) -> Candidate:
        raise error

    return make


@pytest.mark.parametrize(
    ("maker", "error", "status", "words"),
    [
        ("make_peer", RuntimeError("no image\nat all"), 0, "not run: fa2 (peer) (tiny-group): RuntimeError: no image"),
        ("make_peer", torch.OutOfMemoryError("tried 9 GiB"), 0, "out of memory: tried 9 GiB"),
        ("make_ours", torch.OutOfMemoryError("tried 9 GiB"), 0, "out of memory: tried 9 GiB"),
        ("make_ours", ValueError("has no window"), 0, "not run: reference (tiny-group): ValueError: has no window"),
        ("make_ours", RuntimeError("broke"), 1, "FAILED: reference (tiny-group): RuntimeError: broke"),
    ],
)  # fmt: skip
def test_one_candidate_that_breaks_does_not_end_the_run(
    maker: str,
    error: Exception,
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Kernels of others raise anything; one of ours that breaks fails the run, at its end."""
    monkeypatch.setattr(run, "make_peer", stand_in_peers)
    monkeypatch.setattr(run, maker, raising(error))
    results = tmp_path / "attention.jsonl"
    arguments = ["bench", "attention", "--cases", "tiny-group", "--impls", "reference", "--peers", "fa2"]
    assert main([*arguments, *FAST, "--results", str(results)]) == status
    shown = capsys.readouterr().out
    assert words in shown.partition("\n\n")[2]
    assert ("Traceback" in shown) == (status == 1)
    assert [row["impl"] for row in read_rows(results)] == ["reference" if maker == "make_peer" else "fa2"]


@pytest.mark.parametrize(
    ("option", "known"), [("--cases", "tiny-tree"), ("--impls", "flash-fa4"), ("--peers", "kv-copy-fa4")]
)
def test_an_unknown_name_is_answered_with_those_there_are(
    option: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    results = tmp_path / "attention.jsonl"
    assert main(["bench", "attention", option, f"{known},fa9", "--results", str(results)]) == 2
    shown = capsys.readouterr()
    assert "fa9; there are " in shown.err and known in shown.err.partition("there are")[2]
    assert not shown.out and not results.exists()


@pytest.mark.parametrize("arguments", [["--cases", "tiny-tree,"], ["--budget-ms", "0"], ["--speed", "1"]])
def test_a_wrong_command_line_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main(["bench", "attention", *arguments])
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_none_leaves_ours_or_the_peers_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "make_peer", stand_in_peers)

    def names(impls: list[str], peers: list[str] | None) -> list[str]:
        outcome = run.bench_attention(
            cases=["tiny-group"], impls=impls, peers=peers, budget_s=0.0, command="", say=lambda _: None
        )
        return [row.impl for row in outcome.rows]

    assert names(["none"], ["fa2", "fa4"]) == ["fa2", "fa4"]
    assert names(["reference"], ["none"]) == ["reference"]
    assert names(["reference"], None) == ["reference"]  # peers need a GPU


def test_every_implementation_there_is_can_be_named():
    assert {status.name for status in available_impls()} <= set(OUR_IMPLS)


@pytest.mark.gpu
def test_everything_runs_on_the_gpu():
    """Tiny cases through all implementations and peers that this machine has: nothing is wrong and nothing breaks."""
    tiny = [case.name for case in CASES.values() if not case.needs_gpu]
    outcome = run.bench_attention(
        cases=tiny, peers=["fa4", "fa2", "kv-copy-fa4", "flex-triton", "cudnn"], budget_s=0.01, command=""
    )
    assert not outcome.failed
    assert {row.figures["case_name"] for row in outcome.rows if row.impl == "auto"} == set(tiny)
    assert all(row.figures["peak_extra_gib"] > 0 for row in outcome.rows)  # type: ignore[operator]
