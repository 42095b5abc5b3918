from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.conftest import WriteJsonl, make_byte_tokenizer, make_character_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ratoon.data import DataConfig, PromptSplit, load_prompts
from ratoon.types import UserError


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> PromptSplit:
    settings = {"chat_template": False, **settings}
    return load_prompts(DataConfig(source=path.name, **settings), tokenizer, base_dir=path.parent)


def sums(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]


def texts(split: PromptSplit) -> list[str]:
    return [prompt.text for prompt in (*split.train, *split.heldout)]


def test_raw_text_becomes_prompts_in_source_order(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl([{"prompt": "1+1=", "answer": 2, "level": 7}, {"prompt": "2+3=", "answer": "5", "level": 8}])
    split = load(path, tokenizer, prompt_template="Q: {prompt} {x}\nA: ")
    first, second = split.train
    assert (first.id, first.text, first.answer, first.metadata) == (
        "rows.jsonl:1", "Q: 1+1= {x}\nA: ", "2", {"prompt": "1+1=", "answer": 2, "level": 7},
    )  # fmt: skip
    assert tokenizer.convert_ids_to_tokens(first.token_ids.tolist()) == list(first.text)
    assert second.answer == "5"
    assert split.columns == {"prompt", "answer", "level"}
    assert split.heldout == ()


def test_every_column_keeps_its_own_name_and_value(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    """A function may name the columns that became prompt and answer: a filter here, a reward by the same mapping."""
    path = write_jsonl([{"q": "1+1=", "biggest": 2}, {"q": "2+3=", "biggest": 5}])
    (path.parent / "mine.py").write_text("def keep(q, biggest):\n    return q.startswith('2') and biggest == 5\n")
    split = load(
        path, tokenizer,
        prompt_column="q", answer_column="biggest", prompt_template="Q: {prompt}", filter="python:mine.py:keep",
    )  # fmt: skip
    (prompt,) = split.train
    assert (prompt.text, prompt.answer) == ("Q: 2+3=", "5")
    assert prompt.metadata == {"q": "2+3=", "biggest": 5}


def test_the_chat_template_wraps_prompt_and_system_prompt(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl(sums(1))
    split = load(path, tokenizer, chat_template=True, system_prompt="Add.", prompt_template="{prompt}?")
    prompt = split.train[0]
    assert prompt.text == "<|system|>Add.<eos><|user|>0+1=?<eos><|assistant|>"
    assert prompt.token_ids.tolist().count(tokenizer.eos_token_id) == 2, "special tokens of the template are one token"


def test_a_tokenizer_without_chat_template_is_refused(write_jsonl: WriteJsonl):
    with pytest.raises(UserError, match=r"no chat template; set data\.chat_template = false"):
        load(write_jsonl(sums(1)), make_character_tokenizer(chat_template=None), chat_template=True)


def test_a_template_that_raises_or_ignores_is_refused(write_jsonl: WriteJsonl):
    path = write_jsonl(sums(1))
    raising = make_character_tokenizer(chat_template="{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match=r"rows\.jsonl:1.*System role not supported.*drop data\.system_prompt"):
        load(path, raising, chat_template=True)
    deaf = make_character_tokenizer(chat_template="{{ messages[-1]['content'] }}")
    with pytest.raises(UserError, match=r"data\.system_prompt does not appear"):
        load(path, deaf, chat_template=True, system_prompt="Add.")
    mute = make_character_tokenizer(chat_template="hello")
    with pytest.raises(UserError, match="the prompt does not appear"):
        load(path, mute, chat_template=True)


def test_a_template_that_prints_the_day_prints_the_same_day_for_ever(write_jsonl: WriteJsonl):
    dated = make_character_tokenizer(chat_template="{{ strftime_now('%d %b %Y') }} {{ messages[-1]['content'] }}")
    split = load(write_jsonl(sums(1)), dated, chat_template=True)
    assert split.train[0].text == "01 Jan 2025 0+1="
    assert "fixed" in split.report.warnings[0]


def test_raw_text_gets_bos_but_no_eos(write_jsonl: WriteJsonl):
    tokenizer = make_character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
    )
    path = write_jsonl([{"prompt": "ab", "answer": ""}, {"prompt": "ab<eos>", "answer": ""}])
    plain, closed = load(path, tokenizer).train
    assert tokenizer.convert_ids_to_tokens(plain.token_ids.tolist()) == ["<bos>", "a", "b"]
    assert tokenizer.convert_ids_to_tokens(closed.token_ids.tolist())[:4] == ["<bos>", "a", "b", "<eos>"]
    chat = load(path, tokenizer, chat_template=True).train[0]
    assert tokenizer.convert_ids_to_tokens(chat.token_ids.tolist())[0] == "<", "a chat template writes its own BOS"


def test_duplicates_are_counted_and_the_first_kept(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3"), ("c", "4")]
    split = load(write_jsonl([{"prompt": p, "answer": a} for p, a in rows]), tokenizer, num_heldout=1)
    assert sorted((*split.train, *split.heldout), key=lambda prompt: prompt.text)[0].answer == "1"
    report = split.report
    assert (report.num_rows, report.num_duplicates, report.num_conflicts) == (5, 2, 1)
    assert (report.num_train, report.num_heldout) == (2, 1)
    assert "removed 2 duplicates; 2 to train on, 1 held out" in report.lines()[0]
    assert any("another answer" in line for line in report.lines())


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=20),
    heldout=st.integers(0, 7),
    seed=st.integers(0, 9),
)
def test_heldout_prompts_are_never_trained_on(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], heldout: int, seed: int
):
    path = tmp_path_factory.mktemp("split") / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{name}", "answer": ""}}\n' for name in names))
    tokenizer = make_byte_tokenizer()
    if heldout >= len(set(names)):
        with pytest.raises(UserError, match=r"data\.num_heldout"):
            load(path, tokenizer, num_heldout=heldout, seed=seed)
        return
    split = load(path, tokenizer, num_heldout=heldout, seed=seed)
    assert len(split.heldout) == heldout
    assert sorted(texts(split)) == sorted(set(names)), "every distinct prompt once, on one side"


def test_the_split_does_not_depend_on_row_order_and_changes_with_the_seed(
    write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
):
    rows = sums(40)
    first = {prompt.text for prompt in load(write_jsonl(rows), tokenizer, num_heldout=10).heldout}
    turned = {prompt.text for prompt in load(write_jsonl(rows[::-1]), tokenizer, num_heldout=10).heldout}
    other = {prompt.text for prompt in load(write_jsonl(rows), tokenizer, num_heldout=10, seed=1).heldout}
    assert first == turned
    assert first != other


def test_too_many_heldout_names_the_counts(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl([*sums(3), *sums(3)])
    with pytest.raises(UserError, match=r"num_heldout = 3 .* of 6 rows, 3 distinct prompts are left"):
        load(path, tokenizer, num_heldout=3)


def test_over_long_prompts_are_an_error_or_a_counted_drop(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    """Trinity-RFT#287, rllm#280, rllm#275, unsloth#2666: one long prompt ended the run.

    verl#6239: it was counted otherwise.
    """
    path = write_jsonl([{"prompt": "x" * length, "answer": ""} for length in (3, 9, 4, 12)])
    with pytest.raises(
        UserError, match=r"2 of 4 prompts .* = 8: rows\.jsonl:2 \(9 tokens\), rows\.jsonl:4 \(12 tokens\)"
    ):
        load(path, tokenizer, max_prompt_tokens=8)
    split = load(path, tokenizer, max_prompt_tokens=8, over_long="drop")
    assert [prompt.num_tokens for prompt in split.train] == [3, 4]
    assert split.report.num_over_long == 2
    lengths = split.report.lengths
    assert (lengths.minimum, lengths.median, lengths.maximum) == (3, 3.5, 4)
    assert "2 over-long prompts" in split.report.lines()[0]
    assert load(path, tokenizer, max_prompt_tokens=12).report.num_over_long == 0, "the limit itself is allowed"
    with pytest.raises(UserError, match=r"all 4 prompts .* shortest has 3 tokens"):
        load(path, tokenizer, max_prompt_tokens=2, over_long="drop")


def test_the_limit_counts_the_chat_template(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    """GUI-R1#32, EasyR1#207: the filter looked at another text than the model."""
    path = write_jsonl([{"prompt": "x" * 8, "answer": ""}])
    assert load(path, tokenizer, max_prompt_tokens=8).train[0].num_tokens == 8
    with pytest.raises(UserError, match=r"1 of 1 prompts"):
        load(path, tokenizer, max_prompt_tokens=8, chat_template=True)


def test_unknown_characters_are_named(write_jsonl: WriteJsonl):
    path = write_jsonl([{"prompt": "abc", "answer": "x"}, {"prompt": "a中c", "answer": "x"}])
    split = load(path, make_character_tokenizer())
    assert split.report.warnings == (
        "1 of 2 prompts hold words or characters that the tokenizer only knows as <unk>: rows.jsonl:2",
    )
    with pytest.raises(UserError, match=r"all 2 prompts .* cannot read this data"):
        load(path, make_character_tokenizer("xyz"))


def test_characters_a_tokenizer_drops_in_silence_are_named(write_jsonl: WriteJsonl):
    path = write_jsonl([{"prompt": "abc", "answer": "x"}, {"prompt": "a%é", "answer": "x"}])
    split = load(path, make_character_tokenizer("abc", unknown=None))
    assert split.report.warnings == (
        r"1 of 2 prompts hold characters that the tokenizer drops ('%', '\xe9'): rows.jsonl:2",
    )
    with pytest.raises(UserError, match="all 2 prompts"):
        load(path, make_character_tokenizer("a", unknown=None))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the tokenizer makes no token"):
        load(path, make_character_tokenizer("b", unknown=None))


def test_a_byte_tokenizer_knows_every_character(write_jsonl: WriteJsonl, byte_tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl([{"prompt": "中文 🙂 é\u0301\u200b", "answer": "x"}])
    split = load(path, byte_tokenizer)
    assert split.report.warnings == ()
    assert byte_tokenizer.decode(split.train[0].token_ids.tolist()) == split.train[0].text


def test_an_unknown_token_that_is_written_out_is_not_unknown(write_jsonl: WriteJsonl):
    path = write_jsonl([{"prompt": "a<unk>b", "answer": "x"}, {"prompt": "b", "answer": "x"}])
    (warning,) = load(path, make_character_tokenizer()).report.warnings
    assert "spell out special tokens" in warning and "rows.jsonl:1" in warning


def test_loading_twice_gives_the_same(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast):
    path = write_jsonl(sums(30))
    first, second = (load(path, tokenizer, num_heldout=5) for _ in range(2))
    assert texts(first) == texts(second)
    assert first.report == second.report


def test_a_path_may_be_absolute(write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    path = write_jsonl(sums(2))
    config = DataConfig(source=str(path), chat_template=False)
    assert len(load_prompts(config, tokenizer, base_dir=tmp_path / "elsewhere").train) == 2
