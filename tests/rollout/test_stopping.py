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


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece does it: what is in no piece becomes bytes, and a run of bytes is text only as a whole."""
    pieces = ["<eos>", "▁", "a", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="a"))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="a")


TEXT = "aé€😀b 。好"


def crossing_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces of up to four bytes that begin and end inside characters, as merges leave them."""
    letters = dict(enumerate(byte_tokenizer().convert_ids_to_tokens(byte_tokenizer().encode(TEXT))))
    pieces = {"".join(letters.values())[i : i + n] for i in letters for n in range(1, 5)}
    core = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(["<eos>", *sorted(pieces)])}))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


BYTES, WORDS, FALLBACK, CROSSING = byte_tokenizer(), piece_tokenizer(), fallback_tokenizer(), crossing_tokenizer()
UTF8 = BYTES.encode("aé€😀b ")


def word_ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def fallback_ids(text: str) -> list[int]:
    return [5 + byte for byte in text.encode()]


def first_end(tokenizer: PreTrainedTokenizerFast, stop: list[str], tokens: list[int]) -> int | None:
    """Tokens of the shortest prefix whose text holds a stop string."""
    for end in range(1, len(tokens) + 1):
        if any(text in decode(tokenizer, tokens[:end]) for text in stop):
            return end
    return None


def engine_end(tokenizer: PreTrainedTokenizerFast, stop: list[str], tokens: list[int]) -> int | None:
    watch = StopStrings(stop, tokenizer)
    found = next((end for end in range(1, len(tokens) + 1) if watch.ends(tokens[:end])), None)
    for num_new in (2, 8):
        for end in range(num_new, len(tokens) + 1, num_new):
            if watch.are_missing(tokens[:end], num_new):
                assert found is None or not end - num_new < found <= end
            if found is not None and found <= end:
                break
    return found


def test_one_look_is_enough_for_plain_text():
    tokens = BYTES.encode("plain text that goes on and on")
    assert StopStrings(["\n\n"], BYTES).are_missing(tokens, 8)
    assert not StopStrings(["on"], BYTES).are_missing(tokens, 8)
    assert StopStrings([], BYTES).are_missing(tokens, 8)


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


@given(
    st.lists(st.integers(0, len(CROSSING) - 1), max_size=30),
    st.lists(st.text(TEXT + "\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_pieces_across_characters_end_where_their_text_first_holds_a_stop(tokens: list[int], stop: list[str]):
    assert engine_end(CROSSING, stop, tokens) == first_end(CROSSING, stop, tokens)


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 4, *map(fallback_ids, "é€😀。好"), *fallback_ids("é😀")]), max_size=20),
    st.lists(st.text(TEXT + "\ufffd", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_fallback_bytes_end_where_their_text_first_holds_a_stop(parts: list[int | list[int]], stop: list[str]):
    """Whole characters in bytes, and stray bytes that spoil the run they are in."""
    tokens = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    assert engine_end(FALLBACK, stop, tokens) == first_end(FALLBACK, stop, tokens)


def test_a_stop_deep_in_a_run_of_fallback_bytes():
    """A window of the last bytes may begin inside a character; the run is no text then, though the whole of it is."""
    for before in ("", "好", "好好", "é好", "好" * 20, "a好" * 9):
        tokens = fallback_ids(before + "。")
        assert engine_end(FALLBACK, ["。"], tokens) == len(tokens), before


def test_a_token_that_goes_on_beyond_the_stop_ends_the_response_and_is_kept():
    """Tokens are never cut, or their log-probs would be of other tokens; only the text ends at the stop."""
    tokens = word_ids("é", "a", "abba")
    watch = StopStrings(["aab"], WORDS)
    assert not watch.ends(tokens[:2]) and watch.ends(tokens)
    assert watch.cut(decode(WORDS, tokens)) == "éaab"


def test_of_several_stops_in_one_token_the_one_that_ends_first_cuts():
    watch = StopStrings(["bba", "ab", "abb"], WORDS)
    assert watch.ends(word_ids("abba"))
    assert watch.cut("abba") == "ab"


def test_text_is_kept_up_to_and_including_the_string_that_ends_first():
    watch = StopStrings(["ba", "abb"], WORDS)
    assert watch.cut("xxabbayy") == "xxabb"
    assert watch.cut("xx") is None
    assert StopStrings([], WORDS).ends([1, 2]) is False


def test_special_tokens_are_no_text():
    assert decode(WORDS, [3, 1, 4, 0]) == "ab"
    assert StopStrings(["ab"], WORDS).ends([3, 1, 4])


def test_ids_beyond_the_tokenizer_are_no_text():
    """Padded vocabularies: a model may draw ids that no token has, any number of them inside a stop string."""
    beyond = len(WORDS) + 5
    tokens = [*word_ids("a"), *[beyond] * 30, *word_ids("b")]
    assert decode(WORDS, tokens) == "ab"
    assert engine_end(WORDS, ["ab"], tokens) == len(tokens)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, {EOS}), (5, {5}), ([5, 7], {5, 7}), (-1, set()), ([], set())],
)
def test_eos_ids_come_from_the_generation_config_first(configured: int | list[int] | None, expected: set[int]):
    assert eos_token_ids(configured, BYTES) == expected


def test_a_tokenizer_without_eos_gives_none():
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert eos_token_ids(None, PreTrainedTokenizerFast(tokenizer_object=core)) == frozenset()
