import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ratoon.data import DataConfig, PromptSplit, load_prompts
from ratoon.types import UserError

pytest.importorskip("reasoning_gym")


def load(name: str, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> PromptSplit:
    config = DataConfig.model_validate(
        {"source": f"reasoning-gym:{name}", "size": 20, "chat_template": False, **settings}
    )
    return load_prompts(config, tokenizer, base_dir=Path("nowhere"))


def test_prompts_carry_their_entry_for_the_scorer(byte_tokenizer: PreTrainedTokenizerFast):
    split = load("chain_sum", byte_tokenizer, options={"max_terms": 2, "max_digits": 1})
    prompt = split.train[0]
    assert prompt.id == "chain_sum:0"
    assert prompt.text == prompt.metadata["question"]
    assert prompt.answer == prompt.metadata["answer"]
    assert prompt.metadata["metadata"]["source_dataset"] == "chain_sum"
    assert prompt.metadata["generator_options"] == {"max_terms": 2, "max_digits": 1}
    assert eval(prompt.metadata["metadata"]["expression"]) == int(prompt.answer or "")


def test_generation_follows_from_the_seed(byte_tokenizer: PreTrainedTokenizerFast):
    first, again, other = (
        [prompt.text for prompt in load("gcd", byte_tokenizer, seed=seed).train] for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_duplicates_of_a_small_task_are_counted(byte_tokenizer: PreTrainedTokenizerFast):
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    report = load("chain_sum", byte_tokenizer, size=500, options=options, num_heldout=50).report
    assert report.num_rows == 500
    assert report.num_duplicates > 100, "there are about 200 such sums"
    assert report.num_train + report.num_heldout + report.num_duplicates == 500


def test_a_task_whose_answer_is_open_has_none(byte_tokenizer: PreTrainedTokenizerFast):
    split = load("propositional_logic", byte_tokenizer, size=3)
    assert [prompt.answer for prompt in split.train] == [None] * 3
    assert split.report.num_without_answer == 3


def test_several_tasks_in_one(byte_tokenizer: PreTrainedTokenizerFast):
    options = {"datasets": [{"name": "gcd"}, {"name": "lcm", "weight": 2.0, "config": {"max_value": 9}}]}
    split = load("composite", byte_tokenizer, options=options)
    assert {prompt.metadata["metadata"]["source_dataset"] for prompt in split.train} == {"gcd", "lcm"}


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("chain_summ", {}, ['no generator "chain_summ"', "chain_sum"]),
        ("zzzzzzzzzz", {}, ["no generator", "names begin with"]),
        ("chain_sum", {"max_term": 3}, ['no option "max_term"', "did you mean max_terms", "min_digits"]),
        ("chain_sum", {"qqqq": 3}, ['no option "qqqq". Its options are', "min_digits"]),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, ["data.options", "max_terms must be >= min_terms"]),
        ("chain_sum", {"min_terms": "two"}, ["data.options", "TypeError"]),
        ("composite", {}, ["data.options", "at least one dataset"]),
        ("composite", {"datasets": [{"nam": "gcd"}]}, ["data.options", "nam"]),
    ],
)
def test_names_and_options_that_are_refused(
    byte_tokenizer: PreTrainedTokenizerFast, name: str, options: dict[str, Any], wanted: list[str]
):
    with pytest.raises(UserError) as caught:
        load(name, byte_tokenizer, options=options)
    for part in wanted:
        assert part in str(caught.value)


def test_a_missing_package_says_how_to_install_it(
    byte_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'data\.source needs .* pip install -e "\.\[reasoning\]"'):
        load("gcd", byte_tokenizer)
