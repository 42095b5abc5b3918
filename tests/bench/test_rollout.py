"""`ratoon bench rollout`: what it writes, and that a wrong engine gets no speed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ratoon.bench import rollout
from ratoon.bench.rollout import CASES
from ratoon.cli.main import main
from ratoon.models import attach
from ratoon.rollout.engines.drawing import draw_tokens as right_draw
from ratoon.rollout.engines.paged import batch
from ratoon.types import Prompt, Response, RolloutGroup, UserError

torch.set_num_threads(1)
TINY = ["bench", "rollout", "--cases", "tiny", "--repeats", "1"]


def test_rows_have_the_names_of_the_design(tmp_path: Path):
    results = tmp_path / "rollout.jsonl"
    assert main([*TINY, "--ways", "replicated,updates", "--results", str(results)]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    ways = ["replicated", "updates"]
    assert [(row["impl"], row["way"]) for row in rows] == [(i, w) for i in ("paged", "transformers") for w in ways]
    case = CASES["tiny"]
    for row in rows:
        assert row["case"] == {"model": "tiny-Qwen3", "concurrency": 12, "P": case.P, "N": case.N, "R": case.R}
        assert row["peer"] == (row["impl"] == "transformers")
        assert row["layout"] == ("replicated" if row["way"] == "replicated" else "shared")
        assert row["tokens_per_s"] == pytest.approx(row["num_tokens"] / row["generate_s"])
        assert (row["num_tokens"] == 12 * case.R) == (row["way"] != "natural")
        assert (row["num_updates"] > 0) == (row["way"] == "updates")
        assert 0 < row["mean_abs_logprob_gap"] < 1e-5 and row["first_tokens_s"] > 0


@pytest.mark.parametrize(
    ("max_rows", "indices"), [(1, [0, 6]), (60, [0, 3, 6]), (10_000, list(range(7)))], ids=["two", "some", "all"]
)
def test_first_and_last_groups_are_scored(monkeypatch: pytest.MonkeyPatch, max_rows: int, indices: list[int]):
    monkeypatch.setattr(rollout, "_SCORED_ROWS", max_rows)
    token = np.zeros(1, np.int64)
    groups = [
        RolloutGroup(Prompt(f"{number}", token.repeat(9)), (Response(token.repeat(6)),) * 2) for number in range(7)
    ]
    assert [int(group.prompt.id) for group in rollout._scored(groups)] == indices


@pytest.mark.parametrize(
    ("is_in_all", "out_by", "where"), [(True, 0.1, "on average"), (False, 0.005, "at the worst token")]
)
def test_a_wrong_engine_gets_no_speed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_in_all: bool,
    out_by: float,
    where: str,
):
    """One response's first token in 12 of 61 moves the mean by less than what is allowed."""

    def wrong(drafts, logits_BV: torch.Tensor, score: object):
        token_B, logprob_B = right_draw(drafts, logits_BV)
        logprob_B[slice(None) if is_in_all else slice(1)] -= out_by
        return token_B, logprob_B

    monkeypatch.setattr(batch, "draw_tokens", wrong)
    results = tmp_path / "rollout.jsonl"
    assert main([*TINY, "--ways", "shared", "--peers", "none", "--results", str(results)]) == 1
    assert not results.exists()
    out = capsys.readouterr().out
    assert "WRONG, no speed is reported: log-probs out by" in out and where in out


@pytest.mark.parametrize(("of_machine", "of_model", "status"), [("no GPU", None, 0), (None, "bits differ", 1)])
def test_an_engine_without_a_model_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of_machine: str | None,
    of_model: str | None,
    status: int,
):
    """Where its kernels cannot run it is not run; where its model fails the check, that is a failure."""

    def refuse(reason: str | None) -> None:
        if reason is not None:
            raise UserError(reason)

    def attached(model: PreTrainedModel, *, batch_invariant: bool = False) -> PreTrainedModel:
        if batch_invariant:
            refuse(of_model)
        return attach(model)

    monkeypatch.setattr("ratoon.bench.rollout.check_machine", lambda _: refuse(of_machine))
    monkeypatch.setattr("ratoon.bench.rollout.attach", attached)
    arguments = ["--impls", "paged-invariant,paged", "--ways", "shared", "--peers", "none"]
    assert main([*TINY, *arguments]) == status
    lines = capsys.readouterr().out.splitlines()
    told = next(line for line in lines if line.startswith("  paged-invariant "))
    assert ("not run" if status == 0 else "failed") in told and (of_machine or of_model or "") in told
    assert any(line.startswith("  paged shared ") and "tokens/s" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ways", "fast"], "no such way: fast; there are shared, replicated"),
        (["--peers", "sglang"], "no such engine of others: sglang"),
        (["--cases", "135m-c256-p512-n8-r256"], "too large for a CPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not too small")
def test_wrong_choices_are_answered(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "rollout", *arguments]) == 2
    assert words in capsys.readouterr().err
