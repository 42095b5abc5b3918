"""How responses are scored."""

import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.data.user_function import PYTHON_PREFIX, python_target
from ratoon.rewards.components import (
    EXACT_MATCH,
    FORMAT,
    KINDS,
    MATH_VERIFY,
    REASONING_GYM,
    REGEX,
    SOFT_OVERLONG,
    ComponentSpec,
    Match,
)
from ratoon.rewards.extraction import Extract
from ratoon.types.limits import MAX_PROCESSES_OF_HOST, MAX_TOKENS

OnFailure = Literal["raise", "zero", "drop"]

_PYTHON = "python"
_OPTIONS: dict[str, tuple[str, ...]] = {
    REASONING_GYM: ("extract",),
    EXACT_MATCH: ("extract",),
    MATH_VERIFY: ("extract",),
    REGEX: ("extract", "pattern", "match"),
    FORMAT: ("tags",),
    SOFT_OVERLONG: ("buffer_tokens",),
    _PYTHON: (),
}
"""The options that act on each kind."""


class ComponentOptions(BaseModel):
    """A reward function's options, each for the kinds that its description names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    extract: Extract | None = None
    """For `reasoning-gym`, `exact-match`, `math-verify` and `regex`: what part of the response is its answer: all
    its text (when absent), the last number, what the last `<answer>...</answer>` holds, or what the last
    `\\boxed{...}` holds. A response without one scores 0."""

    pattern: str | None = None
    """For `regex`, which needs it: a Python regular expression; the score is 1 where it matches, else 0."""

    match: Match | None = None
    """For `regex`: whether the pattern may match anywhere (`"search"`, also when absent) or must match all of it."""

    tags: tuple[str, ...] | None = None
    """For `format`: the tags that must stand in the response once each, in this order, closed, and with nothing
    but white space around them. `["think", "answer"]` when absent."""

    buffer_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """For `soft-overlong`, which needs it: over how many tokens before `rollout.max_response_tokens` the score
    falls from 0 to -1 (DAPO takes a fifth of the limit)."""


class RewardComponent(ComponentOptions):
    """One of several rewards that are weighted and added up: a `[[reward.components]]` table."""

    function: str
    """As `reward.function`."""

    name: str | None = None
    """Stands in metrics and rollouts; the function's own name when absent."""

    weight: float = Field(default=1.0, ge=-1e6, le=1e6, allow_inf_nan=False)
    """Multiplies the component before it is added to the reward; 0 only records it."""

    @model_validator(mode="after")
    def _check_function(self) -> Self:
        _check_component(self.function, self, "reward.components: function")
        return self

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
            raise ValueError("must begin with a letter and hold letters, digits and '_' only")
        return name


class RewardConfig(ComponentOptions):
    """The `[reward]` table of a recipe: one `function` with its options, or several `[[reward.components]]`."""

    function: str | None = None
    """`"reasoning-gym"` (the task's own scorer), `"exact-match"`, `"math-verify"` (answers compared as mathematics),
    `"regex"`, `"format"`, `"soft-overlong"`, or `"python:FILE.py:FUNCTION"` (relative to the recipe)."""

    components: tuple[RewardComponent, ...] = ()
    """Several functions in place of one; the reward is their weighted sum."""

    score_truncated: bool = True
    """False gives 0 to a response that `rollout.max_response_tokens` cut, whatever it holds: without it, a policy
    can learn that never ending costs nothing. `soft-overlong` judges it all the same."""

    timeout_s: float = Field(default=30.0, gt=0, le=604_800, allow_inf_nan=False)
    """Longest time for scoring one response with one function. A worker that takes longer is killed."""

    on_failure: OnFailure = "raise"
    """What becomes of a response whose score raises, takes too long, kills its worker or is no finite number:
    `"raise"` ends the run with its name, `"zero"` counts that score as 0, `"drop"` trains without the response.
    Each failure is counted."""

    num_workers: int | None = Field(default=None, ge=1, le=MAX_PROCESSES_OF_HOST)
    """Processes that score. When absent, one for each CPU, 4 at most. Each loads the functions anew, so that what a
    Python function keeps from call to call, it keeps for one worker; and each begins with `OMP_NUM_THREADS=1` unless
    that is set."""

    start_timeout_s: float = Field(default=120.0, gt=0, le=604_800, allow_inf_nan=False)
    """Longest time for a worker to start and load the functions."""

    max_memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    """Cap on the private memory of each worker process; beyond it an allocation fails. Absent: none."""

    @property
    def all_components(self) -> tuple[RewardComponent, ...]:
        """The components, also where there is but one function."""
        if self.function is None:
            return self.components
        options = {name: getattr(self, name) for name in ComponentOptions.model_fields}
        return (RewardComponent(function=self.function, **options),)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the components, in order."""
        return tuple(component.name or default_name(component.function) for component in self.all_components)

    @property
    def specs(self) -> tuple[ComponentSpec, ...]:
        """What workers are told, one for each component."""
        return tuple(
            ComponentSpec(
                name=name,
                key="reward.function" if self.function is not None else f"reward.components[{index}].function",
                function=component.function,
                extract=component.extract or "text",
                pattern=component.pattern or "",
                match=component.match or "search",
                tags=component.tags or ("think", "answer"),
            )
            for index, (name, component) in enumerate(zip(self.names, self.all_components, strict=True))
        )

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the greatest reward that there can be; None with a Python function, which may give any.
        A response that is not scored, or cut off, has 0, which lies between them."""
        ends: list[tuple[float, float]] = []
        for component in self.all_components:
            if component.function not in KINDS:
                return None
            least, greatest = (-1.0, 0.0) if component.function == SOFT_OVERLONG else (0.0, 1.0)
            ends.append((component.weight * least, component.weight * greatest))
        return sum(min(pair) for pair in ends), sum(max(pair) for pair in ends)

    @property
    def python_files(self) -> dict[str, str]:
        """By the recipe's key, the Python file it names, relative to the recipe."""
        targets = {spec.key: python_target(spec.function) for spec in self.specs}
        return {key: target[0] for key, target in targets.items() if target is not None}

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.function is None) == (not self.components):
            got = "neither" if self.function is None else "both"
            raise ValueError(
                f"reward needs either `function`, or one or more [[reward.components]] with a function each; got {got}"
            )
        if self.function is not None:
            _check_component(self.function, self, "reward.function")
        elif given := [name for name in ComponentOptions.model_fields if getattr(self, name) is not None]:
            raise ValueError(f"reward.{given[0]} acts on one function; move it into a [[reward.components]] table")
        if repeated := _first_repeated(self.names):
            raise ValueError(f'two of reward.components are called "{repeated}"; give each a `name` of its own')
        return self


def default_name(function: str) -> str:
    """A component's name in metrics where the recipe gives none."""
    target = python_target(function)
    return target[1] if target is not None else function.replace("-", "_")


def _check_component(function: str, options: ComponentOptions, key: str) -> None:
    target = python_target(function)
    if target is None and function not in KINDS:
        kinds = ", ".join(f'"{kind}"' for kind in KINDS)
        raise ValueError(f'{key} must be {kinds} or "{PYTHON_PREFIX}FILE.py:FUNCTION", got "{function}"')
    if target is not None and not (target[0].endswith(".py") and target[1].isidentifier()):
        raise ValueError(
            f'{key} must read "{PYTHON_PREFIX}FILE.py:FUNCTION", got "{function}"; '
            f'for example "{PYTHON_PREFIX}rewards.py:score"'
        )
    _check_options(function if target is None else _PYTHON, options)


def _check_options(kind: str, options: ComponentOptions) -> None:
    for name in ComponentOptions.model_fields:
        value = getattr(options, name)
        if value is None or name in _OPTIONS[kind]:
            continue
        if kind == _PYTHON and name == "extract":
            raise ValueError(
                f'extract = "{value}" cannot act on a Python function, which is given the whole '
                "response; call ratoon.rewards.extract_answer in it"
            )
        able = ", ".join(f'"{other}"' for other, names in _OPTIONS.items() if name in names)
        raise ValueError(f"{name} = {value!r} cannot act on a {kind} reward; it is for {able}")
    if kind == REGEX:
        _check_pattern(options.pattern)
    if kind == SOFT_OVERLONG and options.buffer_tokens is None:
        raise ValueError(
            'a "soft-overlong" reward needs buffer_tokens: a fifth of rollout.max_response_tokens is usual'
        )
    if options.extract == "last-number" and kind == MATH_VERIFY:
        raise ValueError(
            'extract = "last-number" would hide the mathematics from math-verify; use "exact-match" with it'
        )
    for tag in options.tags or ():
        if not re.fullmatch(r"[A-Za-z][\w-]*", tag):
            raise ValueError(f'tags are given by name, such as "think" for <think>...</think>; got {tag!r}')
    if options.tags is not None and (not options.tags or _first_repeated(options.tags)):
        raise ValueError(f"tags must be one or more different names, got {list(options.tags)}")


def _check_pattern(pattern: str | None) -> None:
    if not pattern:
        raise ValueError('a "regex" reward needs a pattern')
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern = {pattern!r} is no regular expression: {error}") from None


def _first_repeated(names: tuple[str, ...]) -> str | None:
    return next(_repeated(names), None)


def _repeated(names: tuple[str, ...]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            yield name
        seen.add(name.lower())
