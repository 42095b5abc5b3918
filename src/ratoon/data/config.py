"""Where prompts come from and how they become tokens."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

GENERATOR_PREFIX = "reasoning-gym:"
FILE_SUFFIXES = (".jsonl",)
PROMPT_PLACE = "{prompt}"

_FILE_ONLY = ("prompt_column", "answer_column")
_GENERATOR_ONLY = ("options", "size")


class DataConfig(BaseModel):
    """The `[data]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: str
    """`"reasoning-gym:NAME"` generates prompts; anything else is a `.jsonl` file, relative to the recipe."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym generator, such as `max_terms = 3`."""

    size: int | None = Field(default=None, ge=1)
    """Items to generate, before duplicates are removed; a generator needs it."""

    seed: int = Field(default=0, ge=0)
    """Fixes the generated items and the choice of held-out prompts; the order of training follows `run.seed`."""

    prompt_column: str = Field(default="prompt", min_length=1)
    """Key of the prompt in each row of a file."""

    answer_column: str = "answer"
    """Key of the reference answer in each row of a file; `""` for data without answers."""

    chat_template: bool = True
    """Wrap the prompt in the tokenizer's chat template; false feeds it as raw text."""

    system_prompt: str | None = Field(default=None, min_length=1)
    """First message of the chat; needs `chat_template`."""

    prompt_template: str = PROMPT_PLACE
    """Text around the prompt, in chat and raw text alike; `{prompt}` marks its place."""

    num_heldout: int = Field(default=0, ge=0)
    """Distinct prompts set aside for evaluation; none of them is trained on."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens, chat template included; no limit when absent."""

    over_long: Literal["error", "drop"] = "error"
    """What becomes of prompts over `max_prompt_tokens`: end with an error, or drop and count them."""

    shuffle: bool = True
    """A new order for every epoch; false keeps the order of the source."""

    @property
    def generator(self) -> str | None:
        """Name of the reasoning-gym generator, None for a file."""
        return self.source.removeprefix(GENERATOR_PREFIX) if self.source.startswith(GENERATOR_PREFIX) else None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.generator is None:
            self._check_file()
            return self
        if not self.generator:
            raise ValueError('data.source "reasoning-gym:" lacks a name; write for example "reasoning-gym:chain_sum"')
        if self.size is None:
            raise ValueError(f'data.source "{self.source}" needs data.size, the number of items to generate')
        for key in ("size", "seed"):
            if key in self.options:
                raise ValueError(f"data.options holds {key!r}; write it as data.{key} instead")
        self._refuse(_FILE_ONLY, "only files have columns; remove it")
        return self

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if PROMPT_PLACE not in self.prompt_template:
            raise ValueError(
                f"data.prompt_template must hold {PROMPT_PLACE} where the prompt goes, got {self.prompt_template!r}"
            )
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError(
                "data.system_prompt needs data.chat_template = true; in raw text, write it into data.prompt_template"
            )
        if self.over_long != "error" and self.max_prompt_tokens is None:
            raise ValueError("data.over_long acts on prompts over data.max_prompt_tokens, which is not set; set it")
        return self

    def _check_file(self) -> None:
        if not self.source.endswith(FILE_SUFFIXES):
            raise ValueError(
                f'data.source must be a .jsonl file or "reasoning-gym:NAME", got "{self.source}"; '
                "convert other formats to one JSON object a line"
            )
        if self.prompt_column == self.answer_column:
            raise ValueError(f'data.prompt_column and data.answer_column are both "{self.prompt_column}"; name two')
        self._refuse(_GENERATOR_ONLY, "only reasoning-gym generators take it; remove it")

    def _refuse(self, keys: tuple[str, ...], why: str) -> None:
        for key in keys:
            field = type(self).model_fields[key]
            if getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f'data.{key} cannot act on data.source "{self.source}": {why}')
