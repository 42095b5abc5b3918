"""Tokenizers made on the spot."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WriteJsonl = Callable[[Sequence[Mapping[str, Any]]], Path]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_character_tokenizer(
    characters: str = string.printable, *, unknown: str | None = "<unk>", chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """One token a character; "<eos>" is the EOS."""
    specials = ["<eos>", "<bos>", *([unknown] if unknown else [])]
    vocabulary = {token: index for index, token in enumerate([*specials, *dict.fromkeys(characters)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", unk_token=unknown)
    fast.chat_template = chat_template
    return fast


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: nothing is unknown to it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_character_tokenizer()


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    def write(rows: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
