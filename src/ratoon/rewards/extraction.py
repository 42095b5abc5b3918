"""The part of a response that is its answer."""

import re
from fractions import Fraction
from typing import Literal

Extract = Literal["text", "last-number", "answer-tag", "boxed"]

# A sign counts unless it stands behind something to subtract from: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"(?:(?<![\w).\]])[-+])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:/[0-9]+|[eE][-+]?[0-9]+)?"
)
_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"
_BOXED = re.compile(r"\\f?boxed\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-"})  # minus sign, en dash
_MAX_NUMBER_CHARACTERS = 64
_MAX_EXPONENT = 400


def extract_answer(text: str, how: Extract = "text") -> str | None:
    """The answer that `text` gives, None where it gives none.

    "text": all of it, without white space at the ends.
    "last-number": the last integer, decimal, fraction a/b or power 1e-3, without thousands commas and plus sign.
    "answer-tag": what the last closed `<answer>...</answer>` holds, without white space at the ends.
    "boxed": what the last `\\boxed{...}` holds, nested braces included, without white space at the ends.
    """
    match how:
        case "text":
            return text.strip()
        case "last-number":
            return _last_number(text)
        case "answer-tag":
            return _last_tag(text)
        case "boxed":
            return _last_box(text)


def _last_number(text: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(text.translate(_MINUS_SIGNS)):
        last = match
    return None if last is None else last.group().replace(",", "").removeprefix("+")


def _last_tag(text: str) -> str | None:
    end = text.rfind(_CLOSE_TAG)
    if end < 0:
        return None
    start = text.rfind(_OPEN_TAG, 0, end)
    return None if start < 0 else text[start + len(_OPEN_TAG) : end].strip()


def _last_box(text: str) -> str | None:
    last = None
    for match in _BOXED.finditer(text):
        last = match
    if last is None:
        return None
    depth = 1
    for brace in _BRACES.finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[last.end() : brace.start()].strip()
    return None  # never closed: the response was cut


def number_value(text: str) -> Fraction | None:
    """The exact value of what "last-number" extracts; None for a/0 and for numbers of absurd size."""
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    _, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        return None
    try:
        return Fraction(text) if "/" not in text else _ratio(text)
    except (ValueError, ZeroDivisionError):
        return None


def _ratio(text: str) -> Fraction:
    numerator, _, denominator = text.partition("/")
    return Fraction(numerator) / Fraction(denominator)
