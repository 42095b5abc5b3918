"""Prompt columns that hold conversations, as TRL and verl have them."""

from pathlib import Path
from typing import Any

import pytest
from tests.data.conftest import WriteJsonl, make_character_tokenizer
from tests.data.reading import read
from transformers import PreTrainedTokenizerFast

from ratoon.data import DataConfig, PromptSplit, load_prompts
from ratoon.types import UserError

USER = {"role": "user", "content": "1+1="}
SYSTEM = {"role": "system", "content": "Add."}


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> PromptSplit:
    return load_prompts(DataConfig(source=path.name, **settings), tokenizer, base_dir=path.parent)


def rows_of(*prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "2"} for prompt in prompts]


def test_a_conversation_is_rendered_turn_by_turn(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    """verl#6921: a separator of turns was lost."""
    turns = [SYSTEM, USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "sure?"}]
    prompt = load(write_jsonl(rows_of(turns)), tokenizer, prompt_template="Q: {prompt}").train[0]
    assert prompt.text == "<|system|>Add.<eos><|user|>1+1=<eos><|assistant|>3<eos><|user|>Q: sure?<eos><|assistant|>"
    assert prompt.token_ids.tolist() == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


def test_one_user_turn_is_the_same_prompt_as_its_text(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    parts = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}
    nulls = {**USER, "name": None, "tool_calls": None}  # Parquet fills in what other rows have
    split = load(write_jsonl(rows_of("1+1=", [USER], [parts], [nulls])), tokenizer)
    assert (len(split.train), split.report.num_duplicates) == (1, 3)


def test_a_system_message_of_its_own_stays(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl(rows_of([SYSTEM, USER], [USER], "2+2="))
    split = load(path, tokenizer, system_prompt="Be brief.")
    assert [prompt.text.partition("<eos>")[0] for prompt in split.train] == [
        "<|system|>Add.", "<|system|>Be brief.", "<|system|>Be brief.",
    ]  # fmt: skip
    assert any("1 conversations" in warning and "data.system_prompt" in warning for warning in split.report.warnings)
    with pytest.raises(UserError, match=r"data\.system_prompt cannot act: each of the 1 conversations"):
        load(write_jsonl(rows_of([SYSTEM, USER])), tokenizer, system_prompt="Be brief.")


def test_raw_text_cannot_hold_a_conversation(write_jsonl: WriteJsonl):
    tokenizer = make_character_tokenizer(chat_template=None)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the prompt is a conversation.*set data\.chat_template = true"):
        load(write_jsonl(rows_of([USER])), tokenizer, chat_template=False)
    with pytest.raises(UserError, match="this tokenizer has no chat template"):
        load(write_jsonl(rows_of([USER])), tokenizer)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is an empty conversation"),
        (["1+1="], "message 1, is '1+1='; a message is an object"),
        ([{"from": "human", "value": "1+1="}], "message 1, has from, value; a message needs role and content"),
        ([{"role": "user", "content": None}], "message 1, has role; a message needs role and content"),
        ([{}], "message 1, has nothing"),
        ([{"role": "human", "content": "a"}], "message 1, has the role 'human'; allowed: system, developer, user"),
        ([USER, {"role": "assistant", "content": "2"}], "ends with the assistant's message"),
        ([SYSTEM], "ends with the system's message"),
        ([{**USER, "tool_calls": [{"id": 1}]}], "message 1, has 'tool_calls', which is not supported"),
        ([USER, {"role": "user", "content": " \n"}], "rows.jsonl:1: the prompt is empty"),
        ([{"role": "user", "content": 3}], "content that is no text: 3"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}]}],
            "a part of type 'image'; prompts are text only: multimodal data is not supported",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}], "type 'input_audio'"),
        ([{"role": "user", "content": ["a"]}], "a part that is no text: 'a'"),
        ([{"role": "user", "content": "a\ud83d"}], "surrogate"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named(write_jsonl: WriteJsonl, prompt: Any, message: str):
    with pytest.raises(UserError) as caught:
        read(write_jsonl(rows_of(prompt)))
    assert "rows.jsonl" in str(caught.value)
    assert message in str(caught.value)


def test_the_limit_counts_the_whole_conversation(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    """verl#6239: the filter counted other tokens than the run computes."""
    path = write_jsonl(rows_of([SYSTEM, USER], [USER]))
    lengths = [prompt.num_tokens for prompt in load(path, tokenizer).train]
    split = load(path, tokenizer, max_prompt_tokens=lengths[1], over_long="drop")
    assert [prompt.num_tokens for prompt in split.train] == lengths[1:]
    assert lengths == [
        len(tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"])  # pyright: ignore[reportArgumentType, reportCallIssue]
        for turns in ([SYSTEM, USER], [USER])
    ]
