"""Where prompts come from and how they become tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratoon.data.user_function import python_target
from ratoon.types.limits import MAX_EVALUATED, MAX_ROWS, MAX_TOKENS

GENERATOR_PREFIX = "reasoning-gym:"
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow")
PROMPT_PLACE = "{prompt}"

_FILE_ONLY = ("prompt_column", "answer_column", "split", "max_rows")
_BELONG_TO_ONE_SOURCE = ("options", "size", "split", "max_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source with every setting it has of its own or takes over from `[data]`."""

    key: str
    """Where the recipe sets it, for messages: `data` or `data.sources[0]`."""

    name: str
    """What prompt ids, metrics and reports call it."""

    source: str
    weight: float | None
    prompt_column: str
    answer_column: str
    options: dict[str, Any]
    size: int | None
    split: str | None
    max_rows: int | None
    system_prompt: str | None
    prompt_template: str
    filter: str | None

    @property
    def generator(self) -> str | None:
        """Name of the reasoning-gym generator, None for files."""
        return generator_name(self.source)


class SourceConfig(BaseModel):
    """One `[[data.sources]]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str
    """Files, a dataset folder or a generator, as in `data.source`."""

    name: str | None = Field(default=None, min_length=1)
    """What prompt ids, metrics and reports call it; absent: the file's or folder's name, or the generator's."""

    weight: float | None = Field(default=None, gt=0, le=MAX_ROWS, allow_inf_nan=False)
    """Prompts of a step come from each source in proportion to its weight; a small source is repeated. All sources
    have one or none has: then they are one pool, in which every prompt is equally frequent."""

    options: dict[str, Any] = Field(default_factory=dict)
    """As in `[data]`."""

    size: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """As in `[data]`."""

    split: str | None = Field(default=None, min_length=1)
    """As in `[data]`."""

    max_rows: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """As in `[data]`."""

    prompt_column: str | None = Field(default=None, min_length=1)
    """Absent: that of `[data]`."""

    answer_column: str | None = None
    """Absent: that of `[data]`."""

    system_prompt: str | None = None
    """Absent: that of `[data]`; `""` for none."""

    prompt_template: str | None = None
    """Absent: that of `[data]`."""

    filter: str | None = None
    """Absent: that of `[data]`; `""` for none."""


class DataConfig(BaseModel):
    """The `[data]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str | None = Field(default=None, min_length=1)
    """Files (`.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.parquet`, `.arrow`), a pattern of them such as `"rows/*.jsonl"`,
    or a Hugging Face dataset folder, relative to the recipe; or `"reasoning-gym:NAME"`, which generates prompts."""

    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each a `[[data.sources]]` table, instead of `source`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym generator, such as `max_terms = 3`."""

    size: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Items to generate, before duplicates are removed; a generator needs it."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes the generated items and the choice of held-out prompts; the order of training follows `run.seed`."""

    split: str | None = Field(default=None, min_length=1)
    """Split of a dataset folder; absent: its only one, or `train`."""

    max_rows: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Read only the first so many rows of the source."""

    prompt_column: str = Field(default="prompt", min_length=1)
    """Column of the prompt: text, or a conversation (a list of `{role, content}`) that ends with the user's turn."""

    answer_column: str = "answer"
    """Column of the reference answer; `a.b` reads `b` inside column `a`; `""` for data without answers."""

    chat_template: bool = True
    """Wrap the prompt in the tokenizer's chat template; false feeds it as raw text."""

    system_prompt: str | None = Field(default=None, min_length=1)
    """First message of the chat; needs `chat_template`. A conversation that begins with its own keeps that."""

    prompt_template: str = PROMPT_PLACE
    """Text around the prompt, in chat and raw text alike, and around a conversation's last message; `{prompt}` marks
    its place."""

    filter: str | None = Field(default=None, min_length=1)
    """`python:FILE.py:FUNCTION`, relative to the recipe: keeps the rows for which it returns true, given the `prompt`
    (its text, not yet rendered), `answer`, `metadata` or columns that it names."""

    bad_rows: Literal["error", "drop"] = "error"
    """What becomes of rows whose prompt or answer is missing, empty or of a wrong type: end with an error, or drop and
    count them. Files that cannot be read are an error in any case."""

    num_heldout: int = Field(default=0, ge=0, le=MAX_EVALUATED)
    """Distinct prompts set aside for evaluation; none of them is trained on."""

    max_prompt_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Longest prompt in tokens, chat template included; no limit when absent."""

    over_long: Literal["error", "drop"] = "error"
    """What becomes of prompts over `max_prompt_tokens`: end with an error, or drop and count them."""

    shuffle: bool = True
    """A new order for every epoch; false keeps the order of the source."""

    @property
    def generator(self) -> str | None:
        """Name of the only source's reasoning-gym generator, None for files and for several sources."""
        return None if self.source is None else generator_name(self.source)

    def each_source(self) -> tuple[Source, ...]:
        """Every source with what it takes over from this table."""
        if self.source is not None:
            return (
                Source(
                    key="data",
                    name=_own_name(self.source),
                    source=self.source,
                    weight=None,
                    prompt_column=self.prompt_column,
                    answer_column=self.answer_column,
                    options=self.options,
                    size=self.size,
                    split=self.split,
                    max_rows=self.max_rows,
                    system_prompt=self.system_prompt,
                    prompt_template=self.prompt_template,
                    filter=self.filter,
                ),
            )
        return tuple(self._resolved(source, f"data.sources[{index}]") for index, source in enumerate(self.sources))

    def _resolved(self, source: SourceConfig, key: str) -> Source:
        return Source(
            key=key,
            name=source.name or _own_name(source.source),
            source=source.source,
            weight=source.weight,
            prompt_column=source.prompt_column or self.prompt_column,
            answer_column=self.answer_column if source.answer_column is None else source.answer_column,
            options=source.options,
            size=source.size,
            split=source.split,
            max_rows=source.max_rows,
            system_prompt=(self.system_prompt if source.system_prompt is None else source.system_prompt) or None,
            prompt_template=self.prompt_template if source.prompt_template is None else source.prompt_template,
            filter=(self.filter if source.filter is None else source.filter) or None,
        )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if (self.source is None) == (not self.sources):
            raise ValueError(
                "needs either source or [[data.sources]] tables, got "
                + ("neither; name a file, a dataset folder or a generator" if self.source is None else "both")
            )
        for name in _BELONG_TO_ONE_SOURCE:
            if self.sources and name in self.model_fields_set and getattr(self, name) != _default(self, name):
                raise ValueError(f"data.{name} cannot act on several sources; write it into each [[data.sources]]")
        if self.sources and all(generator_name(source.source) is not None for source in self.sources):
            for name in ("prompt_column", "answer_column"):
                if getattr(self, name) != _default(self, name):
                    raise ValueError(f"data.{name} cannot act: every source is a generator; remove it")
        for source, written in zip(self.each_source(), self.sources or (self,), strict=True):
            _check_source(source, written)
        _check_names_and_weights(self.each_source())
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.over_long != "error" and self.max_prompt_tokens is None:
            raise ValueError("data.over_long acts on prompts over data.max_prompt_tokens, which is not set; set it")
        for source in self.each_source():
            if source.system_prompt is not None and not self.chat_template:
                raise ValueError(
                    f"{source.key}.system_prompt needs data.chat_template = true; in raw text, write it into "
                    "data.prompt_template"
                )
        return self


def generator_name(source: str) -> str | None:
    """The generator that a source names, None for files and folders."""
    return source.removeprefix(GENERATOR_PREFIX) if source.startswith(GENERATOR_PREFIX) else None


def _own_name(source: str) -> str:
    return generator_name(source) or PurePath(source).name or source


def _default(table: BaseModel, name: str) -> Any:
    return type(table).model_fields[name].get_default(call_default_factory=True)


def _check_source(source: Source, written: BaseModel) -> None:
    """Raises ValueError for settings of one source that contradict each other or cannot act."""
    if source.generator is None:
        _check_file(source)
    else:
        _check_generator(source, written)
    if PROMPT_PLACE not in source.prompt_template:
        raise ValueError(
            f"{source.key}.prompt_template must hold {PROMPT_PLACE} where the prompt goes, "
            f"got {source.prompt_template!r}"
        )
    if source.filter is not None:
        file, function = python_target(source.filter) or ("", "")
        if not file.endswith(".py") or not function.isidentifier():
            raise ValueError(f"{source.key}.filter must be python:FILE.py:FUNCTION, got {source.filter!r}")


def _check_generator(source: Source, written: BaseModel) -> None:
    if not source.generator:
        raise ValueError(
            f'{source.key}.source "{GENERATOR_PREFIX}" lacks a name; write for example "{GENERATOR_PREFIX}chain_sum"'
        )
    if source.size is None:
        raise ValueError(
            f'{source.key}.source "{source.source}" needs {source.key}.size, the number of items to generate'
        )
    for key in ("size", "seed"):
        if key in source.options:
            raise ValueError(f"{source.key}.options holds {key!r}; write it as data.{key} instead")
    for name in _FILE_ONLY:
        if getattr(written, name) != _default(written, name):
            raise ValueError(f'{source.key}.{name} cannot act on source "{source.source}": only files have it')


def _check_file(source: Source) -> None:
    if source.prompt_column == source.answer_column:
        raise ValueError(
            f'{source.key}.prompt_column and {source.key}.answer_column are both "{source.prompt_column}"; name two'
        )
    for name, value in (("options", source.options), ("size", source.size)):
        if value:
            raise ValueError(
                f'{source.key}.{name} cannot act on {source.key}.source "{source.source}": only reasoning-gym '
                "generators take it; remove it" + (" (max_rows limits the rows of files)" if name == "size" else "")
            )
    if source.split is not None and source.source.endswith(FILE_SUFFIXES):
        raise ValueError(
            f'{source.key}.split cannot act on {source.key}.source "{source.source}": only dataset folders have splits'
        )


def _check_names_and_weights(sources: Sequence[Source]) -> None:
    seen: dict[str, str] = {}
    for source in sources:
        other = seen.setdefault(source.name, source.key)
        if other != source.key:
            raise ValueError(f'{other} and {source.key} are both called "{source.name}"; give each a name of its own')
    without = [source.key for source in sources if source.weight is None]
    if without and len(without) < len(sources):
        raise ValueError(
            f"{without[0]} has no weight, but others have; give every source a weight, or none for one pool of all"
        )
