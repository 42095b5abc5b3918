"""From sources to prompts: read, filter, render, tokenize, check and split, all before a model loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ratoon.data.columns import source_row
from ratoon.data.config import DataConfig, Source
from ratoon.data.encoding import Readability, Renderer, encode_texts
from ratoon.data.generators import generate_rows
from ratoon.data.report import DataReport, PromptLengths, SourceCounts
from ratoon.data.row_filter import RowFilter
from ratoon.data.rows import SOURCE_KEY, SourceRow, name_some, short_repr
from ratoon.data.source_files import read_files
from ratoon.data.suspicions import Suspicions
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_A_TIME = 1_024
"""Rows that are held in more than one form, and token ids as Python integers, at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplit:
    """Distinct prompts, in source order."""

    train: tuple[Prompt, ...]
    """At least one, and of every weighted source."""

    heldout: tuple[Prompt, ...]
    """For evaluation; shares no prompt text with `train`."""

    weights: Mapping[str, float]
    """By source, as the recipe sets them, for `PromptStream`; empty where it sets none."""

    report: DataReport

    @property
    def columns(self) -> frozenset[str]:
        """Metadata keys that every prompt has: what a reward function may ask for."""
        return frozenset.intersection(*(frozenset(prompt.metadata) for prompt in (*self.train, *self.heldout)))


@dataclass(slots=True)
class _Tally:
    """Counts of one source while it is read."""

    source: Source
    num_rows: int = 0
    num_bad: int = 0
    num_filtered: int = 0
    num_duplicates: int = 0
    num_over_long: int = 0
    first_bad: str = ""


@dataclass(slots=True)
class _Reading:
    """What is known of all sources read so far."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    suspicions: Suspicions
    readability: Readability
    tallies: list[_Tally] = field(default_factory=list[_Tally])
    ids: dict[str, str] = field(default_factory=dict[str, str])
    """By rendered text, the id of the row that was kept."""

    answers: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """By rendered text, that row's answer."""

    prompts: list[tuple[Prompt, str]] = field(default_factory=list[tuple[Prompt, str]])
    """With the name of their source."""

    over_long: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Id and tokens of prompts over the limit."""

    warnings: list[str] = field(default_factory=list[str])


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, base_dir: Path) -> PromptSplit:
    """Read all of every source; paths are relative to `base_dir`, the recipe's folder.

    Rows that render to the same text are one prompt, the first. The result depends on nothing but the arguments
    and the files. Raises UserError naming file, row and what to do, before any model is loaded.
    """
    reading = _Reading(config, tokenizer, Suspicions(tokenizer), Readability(tokenizer))
    for source in config.each_source():
        _read_source(reading, source, base_dir)
    if not reading.ids:
        raise UserError(f"no row is left of {sum(tally.num_rows for tally in reading.tallies):,}: {_removed(reading)}")
    warnings = [*reading.readability.warnings(reading.ids), *reading.suspicions.warnings(), *reading.warnings]
    if config.chat_template and "strftime_now" in str(tokenizer.chat_template):
        warnings.append("the chat template writes the day into the prompt; it is fixed so that resumed runs agree")
    _check_over_long(reading)
    train, heldout = _split(reading)
    return PromptSplit(
        train=tuple(prompt for prompt, _ in train),
        heldout=tuple(prompt for prompt, _ in heldout),
        weights={tally.source.name: tally.source.weight for tally in reading.tallies if tally.source.weight},
        report=_report(reading, train, heldout, warnings),
    )


def _read_source(reading: _Reading, source: Source, base_dir: Path) -> None:
    tally = _Tally(source)
    reading.tallies.append(tally)
    renderer = Renderer(source, reading.tokenizer, is_chat=reading.config.chat_template)
    rows = _kept_rows(tally, reading.config, base_dir)
    while batch := list(islice(rows, _ROWS_AT_A_TIME)):
        _take_in(reading, tally, batch, renderer)
    renderer.check_system_prompt()
    if renderer.num_own_system_prompts:
        reading.warnings.append(
            f'{renderer.num_own_system_prompts:,} conversations of "{source.name}" keep a system message of their own '
            f"instead of {source.key}.system_prompt"
        )
    if tally.num_bad:
        reading.warnings.append(f'{tally.num_bad:,} bad rows of "{source.name}" were dropped, first: {tally.first_bad}')


def _kept_rows(tally: _Tally, config: DataConfig, base_dir: Path) -> Iterator[SourceRow]:
    """Rows that are well formed and pass the filter; the others are counted, or end the reading with an error."""
    keeps = RowFilter.load(tally.source, base_dir=base_dir)
    for row in _rows(tally, config, base_dir):
        if keeps is None or keeps(row):
            yield row
        else:
            tally.num_filtered += 1


def _rows(tally: _Tally, config: DataConfig, base_dir: Path) -> Iterator[SourceRow]:
    source = tally.source
    if source.generator is not None:
        assert source.size is not None, "DataConfig lets no generator pass without a size"
        for row in generate_rows(
            source.generator, source.options, size=source.size, seed=config.seed, label=source.name
        ):
            tally.num_rows += 1
            yield row
        return
    for found in read_files(source, base_dir=base_dir):
        tally.num_rows += 1
        try:
            row = source_row(found.values, source, id=found.id, where=found.where)
        except UserError as error:
            if config.bad_rows == "error":
                raise
            tally.num_bad += 1
            tally.first_bad = tally.first_bad or str(error)
            continue
        yield row


def _take_in(reading: _Reading, tally: _Tally, rows: Sequence[SourceRow], renderer: Renderer) -> None:
    """Renders and encodes a batch of rows, and keeps what is new and not over-long."""
    config, limit = reading.config, reading.config.max_prompt_tokens
    new: list[tuple[SourceRow, str]] = []
    for row in rows:
        text = renderer(row)
        if text in reading.ids:
            tally.num_duplicates += 1
            reading.suspicions.num_conflicts += reading.answers[text] != row.answer
            continue
        reading.ids[text], reading.answers[text] = row.id, row.answer
        reading.suspicions.look_at(row)
        new.append((row, text))
    encoded = encode_texts([text for _, text in new], reading.tokenizer, is_chat=config.chat_template)
    for (row, text), tokens in zip(new, encoded, strict=True):
        if not tokens:
            raise UserError(f"{row.id}: the tokenizer makes no token of {short_repr(row.prompt_text)}; remove the row")
        reading.readability.look_at(row.id, text, tokens)
        if limit is not None and len(tokens) > limit:
            tally.num_over_long += 1
            reading.over_long.append((row.id, len(tokens)))
            continue
        metadata = {**row.metadata, SOURCE_KEY: tally.source.name} if config.sources else row.metadata
        reading.prompts.append((Prompt(row.id, np.asarray(tokens), text, row.answer, metadata), tally.source.name))


def _removed(reading: _Reading) -> str:
    counts = f"{sum(tally.num_filtered for tally in reading.tallies):,} were dropped by data.filter"
    first_bad = next((tally.first_bad for tally in reading.tallies if tally.first_bad), None)
    if first_bad is not None:
        counts += f", {sum(tally.num_bad for tally in reading.tallies):,} as bad rows, the first: {first_bad}"
    return counts


def _check_over_long(reading: _Reading) -> None:
    limit, over_long, num_distinct = reading.config.max_prompt_tokens, reading.over_long, len(reading.ids)
    if over_long and reading.config.over_long == "error":
        found = name_some([f"{id} ({num_tokens:,} tokens)" for id, num_tokens in over_long])
        raise UserError(
            f"{len(over_long):,} of {num_distinct:,} prompts are over data.max_prompt_tokens = {limit:,}: {found}; "
            'raise the limit, or set data.over_long = "drop" to leave them out'
        )
    if len(over_long) == num_distinct:
        shortest = min(num_tokens for _, num_tokens in over_long)
        raise UserError(
            f"all {num_distinct:,} prompts are over data.max_prompt_tokens = {limit:,} and would be dropped; "
            f"the shortest has {shortest:,} tokens: raise the limit"
        )


def _split(reading: _Reading) -> tuple[list[tuple[Prompt, str]], list[tuple[Prompt, str]]]:
    """(train, heldout). A prompt's place depends on its text and the seed, hardly on the rows around it."""
    prompts, config = reading.prompts, reading.config
    if config.num_heldout >= len(prompts):
        raise UserError(
            f"data.num_heldout = {config.num_heldout:,} leaves nothing to train on: of "
            f"{sum(tally.num_rows for tally in reading.tallies):,} rows, {len(prompts):,} distinct prompts are left; "
            "lower it or bring more data"
        )
    by_hash = sorted(range(len(prompts)), key=lambda index: _split_hash(prompts[index][0].text, config.seed))
    chosen = frozenset(by_hash[: config.num_heldout])
    train = [prompt for index, prompt in enumerate(prompts) if index not in chosen]
    heldout = [prompt for index, prompt in enumerate(prompts) if index in chosen]
    with_prompts = {name for _, name in train}
    for tally in reading.tallies:
        if tally.source.weight is not None and tally.source.name not in with_prompts:
            raise UserError(
                f'source "{tally.source.name}" has a weight, but of its {tally.num_rows:,} rows no prompt is left to '
                "train on; remove it, or lower data.num_heldout"
            )
    return train, heldout


def _split_hash(text: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=16).digest()


def _report(
    reading: _Reading, train: Sequence[tuple[Prompt, str]], heldout: Sequence[tuple[Prompt, str]], warnings: list[str]
) -> DataReport:
    total_weight = sum(tally.source.weight or 0.0 for tally in reading.tallies)
    shares = {t.source.name: t.source.weight / total_weight for t in reading.tallies if t.source.weight}
    tokens: dict[str, list[int]] = {}
    for prompt, name in train:
        tokens.setdefault(name, []).append(prompt.num_tokens)
    means = {name: sum(lengths) / len(lengths) for name, lengths in tokens.items()}
    own_shares = {name: len(lengths) / len(train) for name, lengths in tokens.items()}
    return DataReport(
        sources=tuple(
            SourceCounts(
                name=tally.source.name,
                num_rows=tally.num_rows,
                num_bad=tally.num_bad,
                num_filtered=tally.num_filtered,
                num_duplicates=tally.num_duplicates,
                num_over_long=tally.num_over_long,
                num_train=len(tokens.get(tally.source.name, ())),
                num_heldout=sum(name == tally.source.name for _, name in heldout),
            )
            for tally in reading.tallies
        ),
        shares=shares,
        num_conflicts=reading.suspicions.num_conflicts,
        num_without_answer=sum(prompt.answer is None for prompt, _ in (*train, *heldout)),
        lengths=PromptLengths.of([prompt.num_tokens for prompt, _ in (*train, *heldout)]),
        mean_train_tokens=sum((shares or own_shares)[name] * mean for name, mean in means.items()),
        warnings=tuple(warnings),
    )
