"""What the report says of rows that are well formed, and what it foretells."""

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.conftest import WriteJsonl, make_byte_tokenizer

from ratoon.data import DataConfig, load_prompts
from ratoon.data.report import PromptLengths, SourceCounts, expected_dedup_ratio
from ratoon.layout import pack_groups
from ratoon.types import Prompt, Response, RolloutGroup


def report_of(write_jsonl: WriteJsonl, rows: list[dict[str, Any]]):
    path = write_jsonl(rows)
    config = DataConfig(source=path.name, chat_template=False)
    return load_prompts(config, make_byte_tokenizer(), base_dir=path.parent).report


@given(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6), group=st.integers(1, 8), tokens=st.integers(1, 40))
def test_the_expected_dedup_ratio_is_that_of_the_packed_groups(prompts: list[int], group: int, tokens: int):
    groups = [
        RolloutGroup(Prompt(index, [1] * P), [Response([2] * tokens)] * group)  # pyright: ignore[reportArgumentType]
        for index, P in enumerate(prompts)
    ]
    found = expected_dedup_ratio(statistics.mean(prompts), group_size=group, response_tokens=tokens)
    assert found == pytest.approx(pack_groups(groups).dedup_ratio)


def test_sources_count_by_their_share(write_jsonl: WriteJsonl):
    folder = write_jsonl([]).parent
    for name, prompt in (("short", "a" * 10), ("long", "b" * 90)):
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{prompt}", "answer": "x"}}\n')
    settings = {"chat_template": False, "sources": ({"source": "short.jsonl"}, {"source": "long.jsonl"})}
    weighted = {
        **settings,
        "sources": tuple({**s, "weight": w} for s, w in zip(settings["sources"], (3, 1), strict=True)),
    }
    for values, mean in ((settings, 50), (weighted, 30)):
        report = load_prompts(DataConfig.model_validate(values), make_byte_tokenizer(), base_dir=folder).report
        assert report.mean_train_tokens == mean
        assert report.dedup_ratio(group_size=4, response_tokens=10) == 4 * (mean + 10) / (mean + 40)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=250))
def test_lengths_and_percentiles(lengths: list[int]):
    found = PromptLengths.of(lengths)
    assert (found.minimum, found.maximum) == (min(lengths), max(lengths))
    assert found.median == statistics.median(lengths)
    for percent, value in ((90, found.p90), (99, found.p99)):
        assert value == np.percentile(lengths, percent, method="inverted_cdf")


def test_rows_that_do_not_add_up_are_our_fault():
    with pytest.raises(AssertionError, match="the counts of x account for 9 of 10 rows"):
        SourceCounts(
            name="x",
            num_rows=10,
            num_bad=1,
            num_filtered=1,
            num_duplicates=1,
            num_over_long=1,
            num_train=3,
            num_heldout=2,
        )


GOOD = {"prompt": "1+1=", "answer": "2"}
SUSPICIOUS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "say <eos> now"}, "spell out special tokens"),
    ({"prompt": "bell \x07"}, "control characters"),
    ({"prompt": "lost \ufffd"}, "a character lost"),
    ({"prompt": "cafÃ©"}, "UTF-8 that was once read in another encoding"),
    ({"prompt": "it's → itâ€™s"}, "UTF-8 that was once read in another encoding"),
    ({"prompt": '[{"role": "user", "content": "a"}]'}, "conversations written out as text"),
    ({"prompt": "[{'content': 'a'}]"}, "conversations written out as text"),
    ({"prompt": "a", "answer": " "}, "an empty answer"),
    ({"prompt": "Why? Because of the wind.", "answer": "Because of the wind."}, "contain their answer"),
    ({"prompt": "a", "answer": "long " * 3_000}, "an answer of more than 10,000 characters"),
    ({"prompt": "1+1=\n"}, "differ from another in nothing but white space"),
]


@pytest.mark.parametrize(("row", "words"), SUSPICIOUS)
def test_a_suspicious_row_is_named(write_jsonl: WriteJsonl, row: dict[str, Any], words: str):
    (warning,) = report_of(write_jsonl, [GOOD, {**GOOD, **row}]).warnings
    assert warning.startswith("1 of 2 prompts ")
    assert words in warning
    assert warning.endswith(": rows.jsonl:2")


@pytest.mark.parametrize("prompt", ["Is 2 even?\tyes or no\r\n", "[{ not json", "Ã la carte", "is it B? (A) 1 (B) 2"])
def test_ordinary_rows_are_not_suspicious(write_jsonl: WriteJsonl, prompt: str):
    assert report_of(write_jsonl, [GOOD, {"prompt": prompt, "answer": "B"}]).warnings == ()


def test_a_column_of_several_types_is_named(write_jsonl: WriteJsonl):
    rows = [{**GOOD, "prompt": str(n), "level": level, "x": n} for n, level in enumerate([1, None, "2", 2.5, [3]])]
    (warning,) = report_of(write_jsonl, rows).warnings
    assert warning == (
        'column "level" is of several types: a number (rows.jsonl:1), text (rows.jsonl:3), an array (rows.jsonl:5)'
    )


def test_many_suspicious_rows_are_counted_and_a_few_named(write_jsonl: WriteJsonl):
    (warning,) = report_of(write_jsonl, [{"prompt": f"\x00{n}", "answer": "x"} for n in range(50)]).warnings
    assert warning.startswith("50 of 50 prompts hold control")
    assert warning.endswith("rows.jsonl:5 and 45 more")
