"""Weighted items onto ranks, so that the heaviest rank is as light as can be."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Close enough to the bound to stop: a hundredth of a percent of a step is not worth a millisecond of planning.
_TOLERANCE = 1e-4
_NUM_PARTNERS = 8
"""Light ranks that the heaviest may trade with in one round."""


@dataclass(frozen=True, slots=True)
class _Trade:
    """Moves `give` from the heaviest rank to `partner`, and `take` (an item or nothing) back."""

    heavier_after: float
    """Weight of the heavier of the two ranks afterwards."""

    partner: int
    give: tuple[float, int]
    take: tuple[float, int] | None


def balance_ranks(weights: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Item indices by rank, ascending: LPT, then trades that lighten the heaviest rank.

    Within 4/3 - 1/(3 · num_ranks) of the best heaviest rank (Graham 1969, LPT); trades only improve it.
    """
    ranks = _longest_first(weights, num_ranks)
    largest = max(weights, default=0.0)
    target = max(sum(weights) / num_ranks, largest) * (1 + _TOLERANCE)
    _trade(ranks, target, max_rounds=4 * num_ranks + 64)
    return [sorted(item for _, item in rank) for rank in ranks]


def _longest_first(weights: Sequence[float], num_ranks: int) -> list[list[tuple[float, int]]]:
    """(weight, item) by rank, ascending: heaviest item first, each to the lightest rank."""
    ranks: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    lightest = [(0.0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(weights)), key=lambda index: -weights[index]):
        weight, rank = lightest[0]
        ranks[rank].append((weights[item], item))
        heapq.heapreplace(lightest, (weight + weights[item], rank))
    return [sorted(rank) for rank in ranks]


def _trade(ranks: list[list[tuple[float, int]]], target: float, max_rounds: int) -> None:
    """Lightens the heaviest rank, in place, until it meets `target` or no trade helps."""
    loads = np.asarray([sum(weight for weight, _ in rank) for rank in ranks])
    for _ in range(max_rounds):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= target:
            return
        partners = np.argsort(loads, kind="stable")[:_NUM_PARTNERS].tolist()
        trades = [
            trade
            for partner in partners
            if partner != heaviest
            for trade in [_best_trade(ranks, heaviest, partner, float(loads[heaviest] - loads[partner]))]
            if trade is not None
        ]
        if not trades:
            return
        best = min(trades, key=lambda trade: loads[trade.partner] + trade.heavier_after)
        _apply(ranks, heaviest, best)
        for rank in (heaviest, best.partner):
            loads[rank] = sum(weight for weight, _ in ranks[rank])


def _best_trade(ranks: list[list[tuple[float, int]]], heaviest: int, partner: int, gap: float) -> _Trade | None:
    """The trade that brings two ranks, `gap` apart, closest; None where none lightens the heavier one.

    `heavier_after` is measured from the partner's present load.
    """
    back = ranks[partner]
    best: _Trade | None = None
    for give in ranks[heaviest]:
        # The ideal item to take back leaves a difference of half the gap.
        near = bisect_left(back, (give[0] - gap / 2, -1))
        for take in (None, *back[max(near - 1, 0) : near + 1]):
            moved = give[0] - (take[0] if take else 0.0)
            if not 0.0 < moved < gap:
                continue
            heavier_after = max(moved, gap - moved)
            if heavier_after < gap * (1 - 1e-9) and (best is None or heavier_after < best.heavier_after):
                best = _Trade(heavier_after, partner, give, take)
    return best


def _apply(ranks: list[list[tuple[float, int]]], heaviest: int, trade: _Trade) -> None:
    ranks[heaviest].remove(trade.give)
    insort(ranks[trade.partner], trade.give)
    if trade.take is not None:
        ranks[trade.partner].remove(trade.take)
        insort(ranks[heaviest], trade.take)
