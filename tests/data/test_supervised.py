import numpy as np
import pytest
from tests.data.conftest import make_character_tokenizer
from transformers import PreTrainedTokenizerFast

from ratoon.data import supervised_examples
from ratoon.layout import pack_groups
from ratoon.types import FinishReason, Prompt, UserError


def make_prompt(tokenizer: PreTrainedTokenizerFast, text: str, answer: str | None) -> Prompt:
    return Prompt(text, np.array(tokenizer(text)["input_ids"]), text, answer)


def test_exactly_answer_and_eos_are_scored(tokenizer: PreTrainedTokenizerFast):
    prompts = [make_prompt(tokenizer, "1+1=", "2"), make_prompt(tokenizer, "9+9=", "18")]
    groups = supervised_examples(prompts, tokenizer, eos_token_id=0)
    layout = pack_groups(groups)
    assert tokenizer.convert_ids_to_tokens(layout.target_M.tolist()) == ["2", "<eos>", "1", "8", "<eos>"]
    assert [group.prompt.id for group in groups] == ["1+1=", "9+9="]
    (response,) = groups[1].responses
    assert (response.text, response.finish_reason) == ("18", FinishReason.EOS)


def test_prompts_without_answers_are_named(tokenizer: PreTrainedTokenizerFast):
    prompts = [make_prompt(tokenizer, text, answer) for text, answer in (("a", "1"), ("b", None), ("c", ""))]
    with pytest.raises(UserError, match="2 of 3 prompts have no answer to learn from: b, c"):
        supervised_examples(prompts, tokenizer, eos_token_id=0)


@pytest.mark.parametrize("unknown", ["<unk>", None])
def test_answers_the_tokenizer_cannot_write_are_named(unknown: str | None):
    tokenizer = make_character_tokenizer("ab", unknown=unknown)
    prompts = [make_prompt(tokenizer, "a", "b"), make_prompt(tokenizer, "b", "中")]
    with pytest.raises(UserError, match="cannot write the answers of 1 of 2 prompts: b"):
        supervised_examples(prompts, tokenizer, eos_token_id=0)
