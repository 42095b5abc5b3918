"""Several sources in one recipe, filters, and rows that a declared rule drops."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.data.conftest import WriteJsonl, make_character_tokenizer
from transformers import PreTrainedTokenizerFast

from ratoon.data import DataConfig, PromptSplit, PromptStream, load_prompts
from ratoon.types import UserError


def load(folder: Path, **settings: Any) -> PromptSplit:
    config = DataConfig.model_validate({"chat_template": False, **settings})
    return load_prompts(config, make_character_tokenizer(), base_dir=folder)


def put(path: Path, *prompts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts))


def letters(start: str, count: int) -> list[str]:
    return [f"{start}{index}" for index in range(count)]


def test_prompts_tell_their_source_and_ids_are_unique(tmp_path: Path):
    put(tmp_path / "one" / "rows.jsonl", "a", "b")
    put(tmp_path / "two" / "rows.jsonl", "c", "b")
    (tmp_path / "sums.csv").write_text("q,a\nd,1\n")
    sources = (
        {"source": "one/rows.jsonl", "name": "one"},
        {"source": "two/*.jsonl", "name": "two", "prompt_template": "<{prompt}>"},
        {"source": "sums.csv", "prompt_column": "q", "answer_column": "a"},
    )
    split = load(tmp_path, sources=sources, prompt_template="[{prompt}]")
    found = [(prompt.id, prompt.text, prompt.answer, prompt.metadata["ratoon_source"]) for prompt in split.train]
    assert found == [
        ("one:1", "[a]", "x", "one"),
        ("one:2", "[b]", "x", "one"),
        ("two/rows.jsonl:1", "<c>", "x", "two"),
        ("two/rows.jsonl:2", "<b>", "x", "two"),
        ("sums.csv:2", "[d]", "1", "sums.csv"),
    ]
    assert split.weights == {}
    assert split.columns == {"ratoon_source"}
    assert sorted(PromptStream(split.train, seed=0, shuffle=True).take(5), key=lambda p: str(p.id)) == sorted(
        split.train, key=lambda p: str(p.id)
    )


def test_a_duplicate_belongs_to_the_first_source_and_each_counts_its_own(tmp_path: Path):
    put(tmp_path / "a.jsonl", *letters("a", 6))
    put(tmp_path / "b.jsonl", "a0", "a1", *letters("b", 3), "b" * 9)
    sources = ({"source": "a.jsonl", "weight": 3.0}, {"source": "b.jsonl", "weight": 1.0})
    split = load(tmp_path, sources=sources, max_prompt_tokens=4, over_long="drop", num_heldout=2)
    a, b = split.report.sources
    assert (a.num_rows, a.num_duplicates, a.num_over_long, a.num_train + a.num_heldout) == (6, 0, 0, 6)
    assert (b.num_rows, b.num_duplicates, b.num_over_long, b.num_train + b.num_heldout) == (6, 2, 1, 3)
    assert split.report.num_heldout == 2
    assert (split.report.num_rows, split.report.num_duplicates) == (12, 2)
    assert split.weights == {"a.jsonl": 3.0, "b.jsonl": 1.0}
    assert split.report.shares == {"a.jsonl": 0.75, "b.jsonl": 0.25}
    stream = PromptStream(split.train, seed=0, shuffle=True, weights=split.weights)
    taken = [prompt.metadata["ratoon_source"] for prompt in stream.take(40)]
    assert (taken.count("a.jsonl"), taken.count("b.jsonl")) == (30, 10)


def test_the_report_says_how_often_small_sources_are_repeated(tmp_path: Path):
    put(tmp_path / "a.jsonl", *letters("a", 8))
    put(tmp_path / "b.jsonl", *letters("b", 2))
    lines = load(
        tmp_path, sources=({"source": "a.jsonl", "weight": 1}, {"source": "b.jsonl", "weight": 1})
    ).report.lines()
    assert "a.jsonl: 50.0% of the prompts trained on; each comes 1 times while every source is seen once" in lines
    assert "b.jsonl: 50.0% of the prompts trained on; each comes 4 times while every source is seen once" in lines


def test_a_weighted_source_needs_a_prompt_to_train_on(tmp_path: Path):
    put(tmp_path / "a.jsonl", "a", "b")
    put(tmp_path / "b.jsonl", "a")
    sources = tuple({"source": name, "weight": 1.0} for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(UserError, match=r'source "b\.jsonl" has a weight, but of its 1 rows no prompt is left'):
        load(tmp_path, sources=sources)


def test_generators_and_files_mix(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    put(tmp_path / "a.jsonl", "a", "b")
    sources = (
        {"source": "reasoning-gym:gcd", "size": 3, "name": "easy", "options": {"max_value": 9}, "weight": 1.0},
        {"source": "reasoning-gym:gcd", "size": 3, "name": "hard", "options": {"min_value": 100}, "weight": 1.0},
        {"source": "a.jsonl", "weight": 2.0},
    )
    split = load(tmp_path, sources=sources)
    assert [prompt.id for prompt in split.train if str(prompt.id)[4] == ":"][:4:3] == ["easy:0", "hard:0"]
    assert split.train[0].metadata["generator"] == "gcd"


def test_errors_name_the_sources_own_key(tmp_path: Path):
    put(tmp_path / "a.jsonl", "a")
    (tmp_path / "b.csv").write_text("question,answer\na,b\n")
    with pytest.raises(UserError, match=r'b\.csv, line 2: no column "prompt".*set data\.sources\[1\]\.prompt_column'):
        load(tmp_path, sources=({"source": "a.jsonl"}, {"source": "b.csv"}))


FILTER = """\
def short(prompt, answer, level=1):
    return len(prompt) < 3 and level < 5
def odd(prompt):
    return "yes"
def fails(prompt):
    return 1 / (len(prompt) - 3) < 9
def other(colour): ...
"""


def test_a_filter_keeps_rows_and_the_others_are_counted(tmp_path: Path, write_jsonl: WriteJsonl):
    rows = [{"prompt": p, "answer": "1", "level": level} for p, level in (("a", 1), ("bbb", 1), ("c", 9), ("d", 2))]
    write_jsonl(rows)
    (tmp_path / "keep.py").write_text(FILTER)
    split = load(tmp_path, source="rows.jsonl", filter="python:keep.py:short")
    assert [prompt.text for prompt in split.train] == ["a", "d"]
    assert split.report.sources[0].num_filtered == 2
    assert "4 rows, removed 2 rows by the filter; 2 to train on" in split.report.lines()[0]
    sources = ({"source": "rows.jsonl"}, {"source": "rows.jsonl", "name": "all", "filter": ""})
    counts = load(tmp_path, sources=sources, filter="python:keep.py:short").report.sources
    assert [count.num_filtered for count in counts] == [2, 0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("odd", r"odd\(\) in .*keep\.py returned 'yes' for rows\.jsonl:1; return True to keep"),
        ("fails", r"fails\(\) in .*keep\.py failed for rows\.jsonl:2: ZeroDivisionError"),
        ("other", r'asks for "colour", which rows\.jsonl:1 does not have'),
        ("shrot", r"shrot\(\) in .*does not exist; functions there: short"),
    ],
)
def test_a_filter_that_fails_names_the_row(tmp_path: Path, write_jsonl: WriteJsonl, function: str, message: str):
    write_jsonl([{"prompt": prompt, "answer": "x"} for prompt in ("a", "bbb")])
    (tmp_path / "keep.py").write_text(FILTER)
    with pytest.raises(UserError, match=message):
        load(tmp_path, source="rows.jsonl", filter=f"python:keep.py:{function}")


def test_a_filter_that_keeps_nothing_is_said(tmp_path: Path, write_jsonl: WriteJsonl):
    write_jsonl([{"prompt": "abc", "answer": "x"}] * 3)
    (tmp_path / "keep.py").write_text(FILTER)
    with pytest.raises(UserError, match=r"no row is left of 3: 3 were dropped by data\.filter"):
        load(tmp_path, source="rows.jsonl", filter="python:keep.py:short")


def test_bad_rows_are_an_error_or_a_counted_drop(tmp_path: Path, write_jsonl: WriteJsonl):
    prompts = ["a", "", None, 3, [], [{"role": "user", "content": " "}], "b\ud83d", "c"]
    write_jsonl([*({"prompt": prompt, "answer": "x"} for prompt in prompts), {"prompt": "d", "answer": None}, {"x": 1}])
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the prompt is empty"):
        load(tmp_path, source="rows.jsonl")
    split = load(tmp_path, source="rows.jsonl", bad_rows="drop")
    assert [prompt.text for prompt in split.train] == ["a", "c"]
    assert split.report.sources[0].num_bad == 8
    assert '8 bad rows of "rows.jsonl" were dropped, first: rows.jsonl:2: the prompt is empty' in str(
        split.report.warnings
    )
    with pytest.raises(UserError, match=r'no row is left of 10: .*10 as bad rows, the first: .* no column "q"'):
        load(tmp_path, source="rows.jsonl", bad_rows="drop", prompt_column="q")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"')
    with pytest.raises(UserError, match="line 1: broken JSON"):
        load(tmp_path, source="rows.jsonl", bad_rows="drop")


def test_many_rows_of_one_source_need_no_second_copy(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    """Several batches, duplicates across them, and the text of a raw prompt is the very string that was read."""
    put(tmp_path / "rows.jsonl", *letters("q", 2_500), "q0", "q2499")
    split = load_prompts(DataConfig(source="rows.jsonl", chat_template=False), tokenizer, base_dir=tmp_path)
    assert [prompt.text for prompt in split.train] == letters("q", 2_500)
    assert split.report.num_duplicates == 2
    assert [tokenizer.decode(prompt.token_ids.tolist()) for prompt in split.train[::999]] == [
        "q 0",
        "q 9 9 9",
        "q 1 9 9 8",
    ]
