"""Stop strings across token borders, against the decoded text of every prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.tiny import EOS, byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ratoon.rollout.stopping import StopStrings, decode, eos_token_ids

PIECES = ["<eos>", "<tool>", "▁", "a", "b", "ab", "ba", "abba", "▁ab", "c", "▁▁", "é", "x" * 9]


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces of several letters, spaces as "▁" (a leading one is dropped), and two special tokens."""
    core = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="c"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", extra_special_tokens=["<tool>"], unk_token="c"
    )


BYTES, WORDS = byte_tokenizer(), piece_tokenizer()
UTF8 = BYTES.encode("aé€😀b ")


def first_end(tokenizer: PreTrainedTokenizerFast, stop: list[str], tokens: list[int]) -> int | None:
    """Tokens of the shortest prefix whose text holds a stop string."""
    for end in range(1, len(tokens) + 1):
        if any(text in decode(tokenizer, tokens[:end]) for text in stop):
            return end
    return None


def engine_end(tokenizer: PreTrainedTokenizerFast, stop: list[str], tokens: list[int]) -> int | None:
    watch = StopStrings(stop, tokenizer)
    return next((end for end in range(1, len(tokens) + 1) if watch.ends(tokens[:end])), None)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    st.lists(st.text("ab cé", min_size=1, max_size=7), min_size=1, max_size=3),
)
def test_words_end_where_their_text_first_holds_a_stop(tokens: list[int], stop: list[str]):
    assert engine_end(WORDS, stop, tokens) == first_end(WORDS, stop, tokens)


@given(
    st.lists(st.sampled_from([*UTF8, EOS]), max_size=40),
    st.lists(st.text("ab é€😀\ufffd", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_bytes_end_where_their_text_first_holds_a_stop(tokens: list[int], stop: list[str]):
    """Characters of several tokens: a half-written one is not a character yet."""
    assert engine_end(BYTES, stop, tokens) == first_end(BYTES, stop, tokens)


def test_text_is_kept_up_to_and_including_the_string_that_ends_first():
    watch = StopStrings(["ba", "abb"], WORDS)
    assert watch.cut("xxabbayy") == "xxabb"
    assert watch.cut("xx") is None
    assert StopStrings([], WORDS).ends([1, 2]) is False


def test_special_tokens_are_no_text():
    assert decode(WORDS, [3, 1, 4, 0]) == "ab"
    assert StopStrings(["ab"], WORDS).ends([3, 1, 4])


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, {EOS}), (5, {5}), ([5, 7], {5, 7}), (-1, set()), ([], set())],
)
def test_eos_ids_come_from_the_generation_config_first(configured: int | list[int] | None, expected: set[int]):
    assert eos_token_ids(configured, BYTES) == expected


def test_a_tokenizer_without_eos_gives_none():
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert eos_token_ids(None, PreTrainedTokenizerFast(tokenizer_object=core)) == frozenset()
