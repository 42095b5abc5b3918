"""Unusual sizes, texts and chances are runs like any other, or are refused by name; none ends in a traceback."""

import json

import pytest
from tests.loop.tiny_run import TinyRun, metrics_rows, rollouts

from ratoon.rollout.engines.transformers import TransformersEngine

ODD = {
    "sizes": [
        "--model.fresh.hidden_size=7", "--model.fresh.intermediate_size=5", "--model.fresh.num_heads=3",
        "--model.fresh.num_kv_heads=1", "--model.fresh.head_dim=2",
    ],
    "uneven updates": ["--rollout.prompts_per_step=5", "--algorithm.num_minibatches=3", "--rollout.group_size=3"],
    "one response a microbatch": ["--planner.max_rows_per_microbatch=9"],
    "hardly any chance": ["--rollout.temperature=1e-6"],
    "nothing but chance": ["--rollout.temperature=1e6"],
    "one at a time": ["--rollout.max_concurrent_responses=1"],
    "one prompt": ["--data.num_heldout=10"],
    "greedy evaluation": ["--evaluation.temperature=0"],
    "evaluation of groups": ["--evaluation.temperature=0.7", "--evaluation.group_size=3"],
    "stop string": ["--rollout.stop=['a']"],
    "bfloat16": ["--model.dtype=bfloat16"],
    "one checkpoint": ["--trainer.keep_checkpoints=1", "--trainer.checkpoint_every_steps=1"],
    "warm-up longer than the run": ["--trainer.schedule=cosine", "--trainer.warmup_steps=9"],
    "recomputed layers": ["--model.recompute=full", "--model.attention=reference"],
}  # fmt: skip
SAMPLED = ("sizes", "uneven updates", "one response a microbatch", "one checkpoint")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SAMPLED else pytest.mark.full) for c in ODD])
def test_odd_settings_train(tiny: TinyRun, case: str):
    """verl#559, verl#833: sizes that do not divide one another were an error, or NaN."""
    outcome = tiny.train("--trainer.num_steps=2", *ODD[case])
    assert (outcome.status, outcome.err) == (0, "")
    rows = [row for table in rollouts(tiny.run_dir).values() for row in table]
    train = metrics_rows(tiny.run_dir, "train")
    assert len(rows) == sum(row["num_responses"] for row in train)
    assert [row["step"] for row in train] == [1, 2]
    assert all("not_finite" not in row for row in train)
    again = tiny.train("--trainer.num_steps=2", *ODD[case])
    assert "is complete" in again.out


def write_words(tiny: TinyRun, words: list[str], answer: str) -> None:
    text = "".join(json.dumps({"prompt": word, "answer": answer}) + "\n" for word in words)
    (tiny.folder / "words.jsonl").write_text(text)


@pytest.mark.parametrize("alphabet", ["日本🌱ab", "a\u0301é"])
def test_any_unicode_is_trained_on_and_written_down(tiny: TinyRun, alphabet: str):
    words = [first + second for first in alphabet[:3] for second in alphabet]
    write_words(tiny, words, alphabet[0])
    outcome = tiny.train(f"--model.fresh.alphabet={alphabet}", "--trainer.num_steps=1")
    assert (outcome.status, outcome.err) == (0, "")
    assert {row["prompt"] for row in rollouts(tiny.run_dir)["step-000001.parquet"]} <= set(words)


def test_characters_outside_the_alphabet_are_warned_of_or_refused(tiny: TinyRun):
    write_words(tiny, ["ab", "bc", "cx", "日本", "dd"], "a")
    outcome = tiny.train("--data.num_heldout=1", "--trainer.num_steps=0")
    assert outcome.status == 0
    assert "warning" in outcome.out
    write_words(tiny, ["ab", "bc", "cd", "de"], "z")
    refused = tiny.train("--fresh", "--data.num_heldout=1")
    assert refused.status == 2
    assert "cannot write the answers" in refused.err


def test_engine_that_hangs_and_does_not_close_is_reported_by_its_first_failure(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
):
    close = TransformersEngine.close

    async def generate(self: TransformersEngine, *_: object, **__: object) -> None:
        raise TimeoutError("no token for 5 s")

    async def fail_to_close(self: TransformersEngine) -> None:
        await close(self)
        raise TimeoutError("the thread does not end")

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    monkeypatch.setattr(TransformersEngine, "close", fail_to_close)
    failed = tiny.train()
    assert failed.status == 1
    assert "TimeoutError: no token for 5 s" in failed.err
    assert "did not close either: the thread does not end" in failed.out
