"""`ratoon bench policy-update` of cases: what it writes, and what it does when something is wrong."""

import json
from pathlib import Path

import pytest
import torch
from tests.bench.attention.inputs import varlen_stand_in
from tests.bench.policy_update.stand_ins import WRONG, peer_kernel

from ratoon.bench.policy_update import microbatches, run
from ratoon.bench.policy_update.cases import CASES
from ratoon.bench.policy_update.variants import OUR_VARIANTS, Variant
from ratoon.cli.main import main

torch.set_num_threads(1)
TINY = ["bench", "policy-update", "--cases", "tiny", "--budget-ms", "1"]


@pytest.fixture
def peers_on_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbatches, "load_kernel", lambda *_: peer_kernel(varlen_stand_in))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.usefixtures("peers_on_cpu")
def test_rows_have_the_names_of_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "results" / "policy_update.jsonl"
    ours, peers = ["auto/none/none", "auto/full/none"], ["fa4/none/none", "kv-copy-fa4/none/none", "fa2-today"]
    arguments = [*TINY, "--impls", ",".join(ours), "--peers", ",".join(peers), "--results", str(results)]
    assert main(arguments) == 0
    rows = {row["variant"]: row for row in read_rows(results)}
    assert list(rows) == [*ours, *peers]
    case = CASES["tiny"]
    figures = ("recompute", "compile", "step_s", "useful_tflops_per_s", "computed_tokens_per_s", "peak_gib")
    figures += ("logical_tokens_per_s", "dedup_ratio", "flop_ratio", "microbatches", "kernels", "first_call_s")
    figures += (
        "optimizer_s",
        "logprobs",
        "slice_gradient_gap",
        "slice_logprob_gap",
        "full_size_gradient_gap",
        "timing",
    )
    always = ("bench", "case", "impl", "layout", "peer", "device", "versions", "commit", "date", "command")
    for name, row in rows.items():
        assert set(figures + always) <= row.keys()
        assert "useful_mfu" not in row, "a CPU has no peak"
        assert row["bench"] == "policy-update"
        assert row["case"] == {"model": "tiny-Qwen3", "P": case.P, "R": case.R, "N": case.N, "groups": 1}
        assert row["peer"] == (name in peers)
        assert row["layout"] == ("replicated" if row["impl"] in ("fa2", "fa4") else "shared")
        assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
        assert row["repeats"] >= 2
        assert row["dedup_ratio"] == pytest.approx(6 * 76 / 171)
        assert 2.0 < row["flop_ratio"] < row["dedup_ratio"]
        assert row["logical_tokens_per_s"] == pytest.approx(6 * 76 / row["step_s"])
        num_rows = 6 * 76 if row["layout"] == "replicated" else 171
        assert row["computed_tokens_per_s"] == pytest.approx(num_rows / row["step_s"])
        assert row["compile"] is False
        assert row["optimizer_s"] > 0
    assert [rows[name]["microbatches"] for name in rows] == [1, 1, 3, 1, 2]
    assert rows["fa2-today"]["recompute"] == "full"
    table = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert len(table) == 1 + len(rows)
    cells = next(line for line in table if "auto/none/none" in line).split()
    step_s = rows["auto/none/none"]["step_s"]
    times_fa4 = rows["fa4/none/none"]["step_s"] / step_s
    wanted = [rows["fa2-today"]["step_s"] / step_s, times_fa4, times_fa4 / rows["fa4/none/none"]["flop_ratio"]]
    assert [float(cell) for cell in cells[-3:]] == pytest.approx(wanted, abs=0.006)
    assert table[2].split()[-2:] == ["-", "-"], "FA4 did not run under the settings of auto/full/none"


@pytest.mark.full
@pytest.mark.usefixtures("peers_on_cpu")
def test_adapters_alone_are_compared_and_counted(tmp_path: Path):
    """Frozen weights take 4 FLOPs a row and weight in place of 6; what attention takes stays."""
    results = tmp_path / "rows.jsonl"
    arguments = ["bench", "policy-update", "--cases", "tiny-lora", "--budget-ms", "1", "--results", str(results)]
    assert main([*arguments, "--peers", "fa4/selective/none,kv-copy-fa4/none/none"]) == 0
    rows = read_rows(results)
    assert [row["variant"] for row in rows] == [*CASES["tiny-lora"].ours, "fa4/selective/none", "kv-copy-fa4/none/none"]
    case = CASES["tiny-lora"]
    P, R, N = case.P, case.R, case.N
    weights = 3 * (48 * 16 * 2 * (4 + 2) + 3 * 48 * 96)
    pairs = P * (P + 1) // 2 + N * (R * P + R * (R + 1) // 2)
    wanted = 4 * weights * (P + N * R) + 4 * 48 * 257 * N * R + 14 * 4 * 16 * pairs * 3
    for row in rows:
        assert row["case"]["lora_rank"] == 4
        assert row["useful_tflops_per_s"] * row["step_s"] * 1e12 == pytest.approx(wanted)
        assert 0 < row["slice_gradient_gap"] < 1e-3


@pytest.mark.full
@pytest.mark.usefixtures("peers_on_cpu")
def test_a_red_check_prints_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The others are measured all the same, and the run as a whole has failed."""
    right = microbatches.load_kernel
    monkeypatch.setattr(
        microbatches,
        "load_kernel",
        lambda impl, device: peer_kernel(WRONG["first key unseen"]) if impl == "fa2" else right(impl, device),
    )
    results = tmp_path / "rows.jsonl"
    arguments = [*TINY, "--impls", "auto/none/none", "--peers", "fa2/none/none,fa4/none/none"]
    assert main([*arguments, "--results", str(results)]) == 1
    assert [row["variant"] for row in read_rows(results)] == ["auto/none/none", "fa4/none/none"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "fa2/none/none" in line]
    assert len(lines) == 2  # as it happens, and at the end
    for line in lines:
        assert "WRONG, no speed is reported: on the slice" in line


@pytest.mark.full
@pytest.mark.usefixtures("peers_on_cpu")
def test_one_variant_that_cannot_run_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Too little memory is no failure, a kernel of others that breaks is none, one of ours is."""
    right = run._CaseRun.measure

    def measure(self: run._CaseRun, variant: Variant):
        match variant.name:
            case "auto/none/none":
                raise torch.OutOfMemoryError("tried 99 GiB\nmore")
            case "fa2/none/none":
                raise RuntimeError("no image")
            case "auto/selective/none":
                raise RuntimeError("broke")
        return right(self, variant)

    monkeypatch.setattr(run._CaseRun, "measure", measure)
    results = tmp_path / "rows.jsonl"
    arguments = [*TINY, "--peers", "fa2/none/none,fa4/none/none", "--results", str(results)]
    assert main(arguments) == 1
    assert [row["variant"] for row in read_rows(results)] == ["auto/full/none", "fa4/none/none"]
    ending = capsys.readouterr().out.partition("\n\n")[2]
    assert "not run: auto/none/none (tiny): out of memory: tried 99 GiB\n" in ending
    assert "not run: fa2/none/none (peer) (tiny): RuntimeError: no image" in ending
    assert "FAILED: auto/selective/none (tiny): RuntimeError: broke" in ending


def test_a_killed_run_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = run._CaseRun.measure

    def interrupted(self: run._CaseRun, variant: Variant):
        if variant.name == "auto/full/none":
            raise KeyboardInterrupt
        return right(self, variant)

    monkeypatch.setattr(run._CaseRun, "measure", interrupted)
    results = tmp_path / "rows.jsonl"
    assert main([*TINY, "--impls", "auto/none/none,auto/full/none", "--results", str(results)]) == 130
    assert [row["variant"] for row in read_rows(results)] == ["auto/none/none"]


def test_without_a_gpu_peers_say_so(capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--impls", "none", "--peers", "fa4/none/layers"]) == 0
    assert "not run: fa4/none/layers (peer) (tiny): needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "huge"], "no such policy update: huge; there are 1.7b-p8192-r512-n16"),
        (["--impls", "auto/some/none"], "no such variant: auto/some/none; there are auto/none/none"),
        (["--peers", "fa9"], "no such peer: fa9; there are fa2-today"),
        (["--prompt", "9"], "--prompt: only together with --model"),
        (["--model", "x", "--cases", "tiny"], "--cases: not together with --model"),
    ],
)
def test_wrong_choices_are_answered(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "policy-update", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert not shown.out


@pytest.mark.gpu
def test_everything_runs_on_the_gpu():
    """Tiny cases through all variants and peers that this machine has: nothing is wrong and nothing breaks."""
    peers = ["fa2-today", "fa2/none/layers", "fa4/selective/layers", "kv-copy-fa4/full/layers"]
    outcome = run.bench_updates(cases=["tiny"], impls=list(OUR_VARIANTS), peers=peers, budget_s=0.01, command="")
    experts = run.bench_updates(
        cases=["tiny-experts"],
        impls=["auto/none/none", "auto/none/layers"],
        peers=["fa2/none/none"],
        budget_s=0.01,
        command="",
    )
    adapters = run.bench_updates(
        cases=["tiny-lora"], impls=["auto/none/layers"], peers=["fa2/selective/layers"], budget_s=0.01, command=""
    )
    assert not outcome.failed and not experts.failed and not adapters.failed
    assert {row.figures["variant"] for row in outcome.rows} >= {*OUR_VARIANTS, "fa2-today"}
    assert (len(experts.rows), len(adapters.rows)) == (3, 2)
    assert all(row.figures["optimizer_s"] > 0 for row in (*outcome.rows, *adapters.rows))  # type: ignore[operator]
    assert all(row.figures["peak_gib"] > 0 for row in outcome.rows)  # type: ignore[operator]
