"""Parts onto ranks and into their microbatches, and which of a rank's microbatches share a kept prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratoon.planner.balancing import balance_ranks
from ratoon.planner.binning import best_fit, spread
from ratoon.planner.cost import CostModel
from ratoon.planner.cutting import Bundle, Part, merge_parts

Parts = list[Part]
"""Of one microbatch."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive microbatches of one rank: one by itself, or several that share a kept prompt."""

    microbatches: Sequence[Parts]
    """Several: of one part each, all of one group, in order of falling cost."""

    seconds: tuple[float, ...]
    """Of each microbatch, without its fixed cost. The first one has the kept prompt's pass, fixed cost included."""

    @classmethod
    def single(cls, microbatch: Parts) -> "Stretch":
        return cls([microbatch], (_work_s(microbatch),))

    @classmethod
    def kept(cls, microbatches: Sequence[Parts], cost: CostModel) -> "Stretch":
        ordered = sorted(microbatches, key=_work_s, reverse=True)
        responses_s = [part.work_s - part.prompt_s for (part,) in ordered]
        return cls(ordered, (ordered[0][0].work_s + cost.seconds_per_microbatch, *responses_s[1:]))

    @property
    def is_kept(self) -> bool:
        return len(self.microbatches) > 1

    @property
    def num_rows(self) -> int:
        """Token slots computed, the kept prompt's once."""
        stored = sum(part.num_rows for microbatch in self.microbatches for part in microbatch)
        repeated = len(self.microbatches) - 1
        return stored - repeated * self.microbatches[0][0].num_prompt_rows if repeated else stored


def stretches_of(rank: Sequence[Parts], cost: CostModel, *, keeps_prompts: bool) -> list[Stretch]:
    """One rank's microbatches in order of falling cost. keeps_prompts: those that hold one part of the same group each
    stand together and share their prompt, where that is cheaper."""
    alone: dict[int, list[Parts]] = {}
    if keeps_prompts:
        for microbatch in rank:
            if len(microbatch) == 1:
                alone.setdefault(microbatch[0].group_index, []).append(microbatch)
    kept = {
        group: microbatches
        for group, microbatches in alone.items()
        if cost.saved_by_keeping_s(microbatches[0][0].prompt_s, len(microbatches)) > 0
    }
    stretches = [Stretch.kept(microbatches, cost) for microbatches in kept.values()]
    stretches += [
        Stretch.single(microbatch)
        for microbatch in rank
        if len(microbatch) != 1 or microbatch[0].group_index not in kept
    ]
    return sorted(stretches, key=lambda stretch: stretch.seconds[0], reverse=True)


def deal_by_rank(bundles: Sequence[Bundle], cost: CostModel, num_ranks: int, max_rows: int) -> list[list[Parts]]:
    """Parts by rank and microbatch: ranks balanced first, then as few microbatches as the fullest needs.

    Ranks that need fewer spread their single parts over as many, evenly by work where room allows.
    """
    dealt = balance_ranks([_bundle_s(bundle, cost) for bundle in bundles], num_ranks)
    apart = [[[part] for item in rank if len(bundles[item]) > 1 for part in bundles[item]] for rank in dealt]
    singles = [[bundles[item][0] for item in rank if len(bundles[item]) == 1] for rank in dealt]
    rows = [[part.num_rows for part in parts] for parts in singles]
    tight = [best_fit(rank_rows, max_rows) for rank_rows in rows]
    num_microbatches = max(len(own) + len(bins) for own, bins in zip(apart, tight, strict=True))
    ranks: list[list[Parts]] = []
    for own, parts, rank_rows, rank_tight in zip(apart, singles, rows, tight, strict=True):
        num_bins = num_microbatches - len(own)
        even = spread(rank_rows, [part.work_s for part in parts], max_rows, num_bins)
        bins = rank_tight + [[] for _ in range(num_bins - len(rank_tight))] if even is None else even
        ranks.append(own + [merge_parts([parts[item] for item in sorted(items)]) for items in bins])
    return ranks


def deal_by_microbatch(parts: Sequence[Part], num_ranks: int, max_rows: int) -> list[list[Parts]] | None:
    """Parts by rank and microbatch: like microbatches first, over all ranks, then those that cost most side by side.

    None where parts fill no such microbatches evenly.
    """
    rows, work_s = [part.num_rows for part in parts], [part.work_s for part in parts]
    fewest = -(-sum(rows) // (num_ranks * max_rows))
    for num_microbatches in _counts_from(fewest):
        bins = spread(rows, work_s, max_rows, num_microbatches * num_ranks)
        if bins is not None:
            break
    else:
        return None
    merged = (merge_parts([parts[item] for item in sorted(items)]) for items in bins)
    microbatches = sorted(merged, key=_work_s, reverse=True)
    ranks: list[list[Parts]] = [[] for _ in range(num_ranks)]
    loads_s = np.zeros(num_ranks)
    for first in range(0, len(microbatches), num_ranks):
        column = microbatches[first : first + num_ranks]
        lightest_first: list[int] = np.argsort(loads_s, kind="stable").tolist()
        for microbatch, rank in zip(column, lightest_first, strict=True):
            ranks[rank].append(microbatch)
            loads_s[rank] += _work_s(microbatch)
    return ranks


def _bundle_s(bundle: Bundle, cost: CostModel) -> float:
    if len(bundle) == 1:
        return bundle[0].work_s
    prompt_s = bundle[0].prompt_s
    return prompt_s + cost.seconds_per_microbatch + math.fsum(part.work_s - prompt_s for part in bundle)


def _counts_from(fewest: int) -> list[int]:
    """Numbers of microbatches to try: 2 % apart where there are many."""
    counts = [max(fewest, 1)]
    while counts[-1] < 2 * counts[0]:
        counts.append(math.ceil(counts[-1] * 1.02) + (counts[-1] < 50))
    return counts


def _work_s(microbatch: Sequence[Part]) -> float:
    return math.fsum(part.work_s for part in microbatch)
