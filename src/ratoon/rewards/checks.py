"""What a reward must be: one finite number of sane size."""

import math
import numbers
import sys
from typing import Any

from ratoon.data.rows import short_repr
from ratoon.types.errors import UserError

MAX_REWARD = 1e15
"""Largest magnitude: its square, summed over a step, still fits float32."""


def checked_reward(value: Any, where: str) -> float:
    """`value` as a float; `where` names function, prompt and response in an error.

    Accepts any real number, Python's or NumPy's, and booleans. 0 is a score like any other.
    """
    if not _is_number(value):
        hint = "return 0.0 where nothing was earned" if value is None else "return a float"
        raise UserError(f"{where} is {_shown(value)}, not a number; {hint}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise UserError(f"{where} is {reward}; rewards must be finite: find the division or logarithm that made it so")
    if abs(reward) > MAX_REWARD:
        raise UserError(f"{where} is {reward:g}; rewards must lie within +-{MAX_REWARD:g}: scale or clip them")
    return reward


def _is_number(value: object) -> bool:
    numpy = sys.modules.get("numpy")  # workers start sooner without it; whoever returns its types has imported it
    return isinstance(value, numbers.Real) or (numpy is not None and isinstance(value, numpy.bool_))


def _shown(value: object) -> str:
    if value is None:
        return "None"
    text = short_repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"
