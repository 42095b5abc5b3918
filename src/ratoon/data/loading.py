"""From a source to prompts: read, render, tokenize, check and split, all before a model loads."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ratoon.data.config import DataConfig
from ratoon.data.encoding import encode_texts, readability_warnings, render_texts
from ratoon.data.generators import generate_rows
from ratoon.data.jsonl import read_jsonl
from ratoon.data.report import DataReport
from ratoon.data.rows import SourceRow, name_some, short_repr
from ratoon.data.user_paths import resolve_path
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """Distinct prompts, in source order."""

    train: tuple[Prompt, ...]
    """At least one."""

    heldout: tuple[Prompt, ...]
    """For evaluation; shares no prompt text with `train`."""

    report: DataReport

    @property
    def columns(self) -> frozenset[str]:
        """Metadata keys that every prompt has: what a reward function may ask for."""
        return frozenset.intersection(*(frozenset(prompt.metadata) for prompt in (*self.train, *self.heldout)))


@dataclass(frozen=True, slots=True)
class _Distinct:
    rows: list[SourceRow]
    texts: list[str]
    num_conflicts: int


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, base_dir: Path) -> PromptSplit:
    """Read all of `config.source`; a file's path is relative to `base_dir`, the recipe's folder.

    Rows that render to the same text are one prompt, the first. The result depends on nothing but the arguments
    and the file. Raises UserError naming file, row and what to do, before any model is loaded.
    """
    rows = _read_rows(config, base_dir)
    distinct = _distinct(rows, render_texts(rows, config, tokenizer))
    encoded = encode_texts(distinct.texts, tokenizer, is_chat=config.chat_template)
    for row, tokens in zip(distinct.rows, encoded, strict=True):
        if not tokens:
            raise UserError(f"{row.id}: the tokenizer makes no token of {short_repr(row.prompt)}; remove the row")
    warnings = readability_warnings([row.id for row in distinct.rows], distinct.texts, encoded, tokenizer)
    warnings += _suspicions(distinct, config, tokenizer)
    over_long = _over_long(distinct.rows, encoded, config)
    prompts = [
        Prompt(row.id, np.asarray(tokens), text, row.answer, row.metadata)
        for index, (row, text, tokens) in enumerate(zip(distinct.rows, distinct.texts, encoded, strict=True))
        if index not in over_long
    ]
    train, heldout = _split(prompts, config, num_rows=len(rows))
    lengths = [prompt.num_tokens for prompt in prompts]
    report = DataReport(
        source=config.source,
        num_rows=len(rows),
        num_duplicates=len(rows) - len(distinct.rows),
        num_conflicts=distinct.num_conflicts,
        num_over_long=len(over_long),
        num_dropped=len(over_long),
        num_without_answer=sum(prompt.answer is None for prompt in prompts),
        num_train=len(train),
        num_heldout=len(heldout),
        min_prompt_tokens=min(lengths),
        median_prompt_tokens=statistics.median(lengths),
        max_prompt_tokens=max(lengths),
        warnings=tuple(warnings),
    )
    return PromptSplit(train=train, heldout=heldout, report=report)


def _read_rows(config: DataConfig, base_dir: Path) -> list[SourceRow]:
    if config.generator is not None:
        assert config.size is not None, "DataConfig lets no generator pass without a size"
        return generate_rows(config.generator, config.options, size=config.size, seed=config.seed)
    path = resolve_path(config.source, base_dir=base_dir, key="data.source")
    return read_jsonl(path, prompt_column=config.prompt_column, answer_column=config.answer_column)


def _distinct(rows: Sequence[SourceRow], texts: Sequence[str]) -> _Distinct:
    """The first row of each text."""
    first: dict[str, SourceRow] = {}
    num_conflicts = 0
    for row, text in zip(rows, texts, strict=True):
        kept = first.setdefault(text, row)
        num_conflicts += kept.answer != row.answer
    return _Distinct(list(first.values()), list(first), num_conflicts)


def _suspicions(distinct: _Distinct, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    warnings: list[str] = []
    if distinct.num_conflicts:
        warnings.append(f"{distinct.num_conflicts:,} removed duplicates have another answer than the row that was kept")
    specials = [str(token) for token in tokenizer.all_special_tokens]
    marked = [row.id for row in distinct.rows if any(token in row.prompt for token in specials)]
    if marked:
        warnings.append(
            f"{len(marked):,} prompts spell out special tokens of the tokenizer, which will act: {name_some(marked)}"
        )
    if config.chat_template and "strftime_now" in str(tokenizer.chat_template):
        warnings.append("the chat template writes the day into the prompt; it is fixed so that resumed runs agree")
    return warnings


def _over_long(rows: Sequence[SourceRow], encoded: Sequence[Sequence[int]], config: DataConfig) -> frozenset[int]:
    """Indices of prompts over the limit."""
    limit = config.max_prompt_tokens
    if limit is None:
        return frozenset()
    over_long = [index for index, tokens in enumerate(encoded) if len(tokens) > limit]
    if over_long and config.over_long == "error":
        found = name_some([f"{rows[index].id} ({len(encoded[index]):,} tokens)" for index in over_long])
        raise UserError(
            f"{len(over_long):,} of {len(rows):,} prompts are over data.max_prompt_tokens = {limit:,}: {found}; "
            'raise the limit, or set data.over_long = "drop" to leave them out'
        )
    if len(over_long) == len(rows):
        shortest = min(len(tokens) for tokens in encoded)
        raise UserError(
            f"all {len(rows):,} prompts are over data.max_prompt_tokens = {limit:,} and would be dropped; "
            f"the shortest has {shortest:,} tokens: raise the limit"
        )
    return frozenset(over_long)


def _split(
    prompts: Sequence[Prompt], config: DataConfig, *, num_rows: int
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(train, heldout). A prompt's place depends on its text and the seed, hardly on the rows around it."""
    if config.num_heldout >= len(prompts):
        raise UserError(
            f"data.num_heldout = {config.num_heldout:,} leaves nothing to train on: of {num_rows:,} rows, "
            f"{len(prompts):,} distinct prompts are left; lower it or bring more data"
        )
    by_hash = sorted(range(len(prompts)), key=lambda index: _split_hash(prompts[index].text, config.seed))
    chosen = frozenset(by_hash[: config.num_heldout])
    train = tuple(prompt for index, prompt in enumerate(prompts) if index not in chosen)
    heldout = tuple(prompt for index, prompt in enumerate(prompts) if index in chosen)
    return train, heldout


def _split_hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=16).digest()
