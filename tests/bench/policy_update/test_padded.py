"""A benchmark checks before it times, and its rows say everything a reader needs."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ratoon.bench.policy_update import padded
from ratoon.bench.policy_update.padded import PolicyUpdateCase, bench_policy_update
from ratoon.bench.rows import append_rows
from ratoon.models import attach

CASE = PolicyUpdateCase(model="tiny", P=17, R=5, N=3)


@pytest.fixture
def model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attach(LlamaForCausalLM(config))


def test_rows_hold_what_the_design_asks_for(model: PreTrainedModel, tmp_path: Path):
    rows = bench_policy_update(model, CASE, repeats=1, command="ratoon bench policy-update")
    path = tmp_path / "results" / "policy_update.jsonl"
    append_rows(path, rows)
    append_rows(path, rows)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 2 * len(rows)
    for record in records:
        for key in ("bench", "case", "impl", "layout", "peer", "device", "versions", "commit", "date", "command"):
            assert key in record
        assert record["step_s"] > 0
        assert record["peer"] == (record["layout"] == "replicated")
    ours = next(record for record in records if record["impl"] == "auto")
    assert ours["times_ours"] == 1.0
    assert ours["dedup_ratio"] == pytest.approx(3 * 22 / (17 + 15))
    assert ours["flop_ratio"] > 1.0


def test_a_variant_that_computes_something_else_is_not_timed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    right = padded._padded_chunked

    def wrong(model: PreTrainedModel, work: padded._Work) -> torch.Tensor:
        return 1.01 * right(model, work)

    def no_timing(*_: object) -> float:
        raise AssertionError("timed although the check was red")

    monkeypatch.setattr(padded, "_padded_chunked", wrong)
    monkeypatch.setattr(padded, "_time_one", no_timing)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        bench_policy_update(model, CASE, repeats=1, command="")
