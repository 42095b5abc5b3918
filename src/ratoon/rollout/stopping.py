"""Where a response ends: EOS ids, stop strings across token borders, and the decoded text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_MAX_BYTES_PER_CHARACTER = 4
_NOT_TEXT = "\ufffd"
"""What bytes that are no character decode to."""


class StopStrings:
    """Finds the first token after which a response's text holds a stop string.

    Only the last few tokens are decoded at each step: each token that has text and is not special has a byte at least,
    so a stop string of b bytes that has just been completed begins within the last b of them.
    """

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        # A model may have more embeddings than its tokenizer has tokens; the others have no text.
        self._num_tokens = len(tokenizer)
        longest = max((len(text.encode()) for text in stop), default=0)
        # The first tokens of a window may be the tail of a character, or lose a leading space.
        self._window_tokens = longest + _MAX_BYTES_PER_CHARACTER

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of `token_ids` holds a stop string, given that it did not before the last token."""
        if not self._stop or self._is_missing(self._tail(token_ids, self._window_tokens)) is not False:
            return False
        return self.cut(decode(self._tokenizer, token_ids)) is not None

    def are_missing(self, token_ids: Sequence[int], num_new: int) -> bool:
        """Whether one look is enough to say that none of the last `num_new` tokens completes a stop string."""
        if any(_NOT_TEXT in text for text in self._stop):  # what is no text may have become some since
            return False
        return not self._stop or self._is_missing(self._tail(token_ids, self._window_tokens + num_new)) is True

    def _tail(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The last tokens that have text, so many at most."""
        tail: list[int] = []
        for token in reversed(token_ids):
            if token < self._num_tokens and token not in self._special_ids:
                tail.append(token)
                if len(tail) == num_tokens:
                    break
        tail.reverse()
        return tail

    def _is_missing(self, tail: list[int]) -> bool | None:
        """Whether no stop string is in the text of `tail`; None where its last bytes are no text yet."""
        # A window that begins inside a character is decoded wrongly: by some tokenizers (SentencePiece's byte fallback)
        # up to the next token that is no byte. One of the next few tokens begins a character.
        for skipped in range(_MAX_BYTES_PER_CHARACTER):
            window = decode(self._tokenizer, tail[skipped:])
            if any(text in window for text in self._stop):
                return False
            if _NOT_TEXT not in window:
                return True
        return None

    def cut(self, text: str) -> str | None:
        """`text` up to and including the stop string that ends first; None where it holds none."""
        ends = [at + len(stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids` without special tokens, spaces left as they are."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), f"one sequence decodes to one string, got {type(text).__name__}"
    return text


def eos_token_ids(configured: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a response: those of the model's generation config, or else the tokenizer's; may be empty."""
    own = tokenizer.eos_token_id
    assert own is None or isinstance(own, int), f"a tokenizer has one EOS id, got {own!r}"
    chosen = own if configured is None else configured
    if chosen is None:
        return frozenset()
    ids = [chosen] if isinstance(chosen, int) else chosen
    return frozenset(token for token in ids if token >= 0)
