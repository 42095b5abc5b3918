"""Whose turn it is, when several sources share the prompts of a run by weight."""

from collections.abc import Sequence
from fractions import Fraction


def exact_shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """The weights over their sum, without rounding: the order must be the same on every machine."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def next_source(taken: Sequence[int], shares: Sequence[Fraction]) -> int:
    """Index of the source that the next prompt comes from, given how many each has given so far.

    Beginning with none, after every number t of turns each source has had less than one more or fewer than
    t * share. Turn j of a source (from 0) may come from turn floor(j / share) of all on and must have come by turn
    ceil((j + 1) / share); of those that may, the most urgent one is taken, the first where two are. Such windows can
    all be kept (Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate Progress"), and this rule keeps them.
    """
    turn = sum(taken)
    deadlines = [
        (_ceil((count + 1) / share), index)
        for index, (count, share) in enumerate(zip(taken, shares, strict=True))
        if count // share <= turn
    ]
    assert deadlines, "shares add up to 1, so one source is always behind or on time"
    return min(deadlines)[1]


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
