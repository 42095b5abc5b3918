"""What a reward worker is told of each component. Imported by workers, so it needs the standard library only."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ratoon.rewards.extraction import Extract

REASONING_GYM = "reasoning-gym"
EXACT_MATCH = "exact-match"
MATH_VERIFY = "math-verify"
REGEX = "regex"
FORMAT = "format"
SOFT_OVERLONG = "soft-overlong"
"""Judges the length alone, so that it needs no worker."""

KINDS = (REASONING_GYM, EXACT_MATCH, MATH_VERIFY, REGEX, FORMAT, SOFT_OVERLONG)

Match = Literal["search", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """One component, with the defaults of its kind filled in."""

    name: str
    key: str
    """The recipe's key that names the function, for messages."""

    function: str
    extract: Extract
    pattern: str
    match: Match
    tags: tuple[str, ...]


class PromptText(NamedTuple):
    """The side of a prompt that rewards see."""

    id: str | int
    text: str
    answer: str | None
    metadata: dict[str, object]


def place_of(function: str, prompt_id: str | int, response_index: int) -> str:
    """The beginning of every sentence about one response's reward."""
    return f'reward "{function}" of prompt {prompt_id!r}, response {response_index},'
