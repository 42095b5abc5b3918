"""Numbers as text."""

import math

import pytest

from ratoon.view.text import bar, duration, key_values, sparkline


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (59.94, "59.9s"),
        (59.96, "1m 00s"),
        (119.6, "2m 00s"),
        (3599.4, "59m 59s"),
        (3599.6, "1h 00m"),
        (90_061, "25h 01m"),
        (math.inf, "?"),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_sparklines_span_their_own_range():
    assert sparkline([0.0, 0.5, 1.0], width=9, ascii_only=False) == "▁▅█"
    assert sparkline([9.0, 1.0, 2.0], width=2, ascii_only=False) == "▁█"
    assert sparkline([3.0, 3.0], width=9, ascii_only=False) == "▁▁"
    assert sparkline([math.nan, 1.0, math.inf], width=9, ascii_only=False) == "▁"
    assert sparkline([], width=9, ascii_only=False) == ""
    assert sparkline([-1.0, 1.0], width=9, ascii_only=True) == "_#"


@pytest.mark.parametrize(("fraction", "filled"), [(-1, 0), (0, 0), (0.5, 2), (0.99, 4), (7, 4)])
def test_bars_keep_their_width(fraction: float, filled: int):
    assert bar(fraction, width=4, ascii_only=True) == "#" * filled + "." * (4 - filled)


def test_key_values_leave_out_what_is_none():
    assert key_values(a=0.123456, b=None, c=12_345.6, d=7, e=math.nan, f=0.0) == "a=0.1235 c=12346 d=7 e=nan f=0"
