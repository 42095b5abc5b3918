"""How much of a step a GPU had nothing to do."""

import pytest

from ratoon.bench.policy_update.timing import idle_fraction


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0.0),
        ([(3.0, 5.0)], 0.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(3, 4), (0, 1)], 0.5),
        ([(0, 8), (1, 2), (9, 10)], 0.1),
        ([(0, 2), (1, 4), (4, 5)], 0.0),
    ],
)
def test_idle_fraction(spans: list[tuple[float, float]], idle: float):
    assert idle_fraction(spans) == pytest.approx(idle)
