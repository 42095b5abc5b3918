"""Plans against their lower bound, and against Karmarkar-Karp on lengths. No device is timed: seconds are predicted.

The peers deal to ranks by the largest differencing method on lengths, and fill microbatches of a row budget: sequences
each with its own prompt, as verl does (`seqlen_balancing`), or groups with their prompt once.
"""

# Shape letters: P prompt tokens, R response tokens, N responses of a group.

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ratoon.bench.rows import BenchRow
from ratoon.planner import CostModel, GroupShape, plan_shapes
from ratoon.planner.binning import best_fit
from ratoon.planner.cutting import cut_groups
from ratoon.planner.group_shape import ShapeTable
from ratoon.planner.plan import RanksMeet

MAX_SEQUENCE_RANKS = 64
"""Karmarkar-Karp over every sequence holds as many sums for each."""

MAX_SEQUENCES = 1 << 20
"""Of a step: planned in a minute by the slowest way."""

_SEED = 0
_MEDIAN_P, _MEDIAN_R = 600, 700
_SPREAD_P, _SPREAD_R = 0.8, 0.9
_LONGEST = 20
"""Times the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerCase:
    """Groups with log-normal lengths, the longest 20 times the median."""

    groups: int
    N: int
    ranks: int
    max_rows: int

    def shapes(self) -> list[GroupShape]:
        rng = np.random.default_rng(_SEED)
        prompts = _lengths(rng, _MEDIAN_P, _SPREAD_P, (self.groups,))
        responses = _lengths(rng, _MEDIAN_R, _SPREAD_R, (self.groups, self.N))
        return [
            GroupShape(prompt_id=index, num_prompt_tokens=P, response_lengths=tuple(lengths))
            for index, (P, lengths) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True))
        ]


def bench_planner(case: PlannerCase, *, command: str) -> list[BenchRow]:
    """A row for each way of planning the case: ours for both of `RanksMeet`, and the peers."""
    shapes = case.shapes()
    rows: list[BenchRow] = []
    bound_s = 0.0

    def add(impl: str, layout: Literal["shared", "replicated"], plan: Callable[[], dict[str, float | int]]) -> None:
        nonlocal bound_s
        started = time.process_time()
        figures = plan()
        planning_s = time.process_time() - started
        bound_s = bound_s or figures["lower_bound_s"]
        rows.append(
            BenchRow(
                bench="planner",
                case={**asdict(case), "seed": _SEED},
                impl=impl,
                layout=layout,
                peer=not impl.startswith("ratoon"),
                figures={
                    **figures,
                    "lower_bound_s": bound_s,
                    "of_lower_bound": figures["predicted_s"] / bound_s,
                    "lockstep_of_lower_bound": figures["lockstep_s"] / bound_s,
                    "planning_s": planning_s,
                },
                command=command,
            )
        )

    for meet in ("step", "microbatch"):
        add(f"ratoon, ranks meet every {meet}", "shared", lambda meet=meet: _ours(shapes, case, meet))
    add("karmarkar-karp on rows", "shared", lambda: _peers(shapes, case))
    if case.ranks <= MAX_SEQUENCE_RANKS:
        add("karmarkar-karp on lengths", "replicated", lambda: _peers(_singles(shapes), case))
    return rows


def karmarkar_karp(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Item indices by part, sums alike: the largest differencing method (Karmarkar and Karp 1982), for many parts.

    The two partial partitions that differ most become one, the heaviest part of either with the lightest of the other.
    """
    if not sizes:
        return [[] for _ in range(num_parts)]
    sums: list[NDArray[np.int64]] = []
    sources: list[tuple[int, int, NDArray[np.int64]]] = []
    heap: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        sums.append(np.zeros(num_parts, np.int64))
        sums[index][0] = size
        heapq.heappush(heap, (-size, index))
    while len(heap) > 1:
        _, one = heapq.heappop(heap)
        _, other = heapq.heappop(heap)
        # Parts stand by falling sum.
        joined = sums[one] + sums[other][::-1]
        order = np.argsort(-joined, kind="stable")
        sources.append((one, other, order))
        sums.append(joined[order])
        heapq.heappush(heap, (-int(sums[-1][0] - sums[-1][-1]), len(sums) - 1))
        sums[one] = sums[other] = np.empty(0, np.int64)
    # From the last partition back: which part of the whole each part of a partial one is in.
    place_of: dict[int, NDArray[np.int64]] = {heap[0][1]: np.arange(num_parts)}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for number in range(len(sums) - 1, -1, -1):
        place = place_of.pop(number)
        if number < len(sizes):
            parts[int(place[0])].append(number)
            continue
        one, other, order = sources[number - len(sizes)]
        before = np.empty(num_parts, np.int64)
        before[order] = place
        place_of[one], place_of[other] = before, before[::-1]
    return [sorted(part) for part in parts]


def _singles(shapes: Sequence[GroupShape]) -> list[GroupShape]:
    """Every response as a group of its own."""
    return [
        GroupShape(prompt_id=shape.prompt_id, num_prompt_tokens=shape.num_prompt_tokens, response_lengths=(R,))
        for shape in shapes
        for R in shape.response_lengths
    ]


def _ours(shapes: Sequence[GroupShape], case: PlannerCase, meet: RanksMeet) -> dict[str, float | int]:
    plan = plan_shapes(shapes, num_ranks=case.ranks, max_rows_per_microbatch=case.max_rows, ranks_meet=meet)
    return {
        "predicted_s": plan.predicted_s,
        "lockstep_s": plan.lockstep_s,
        "lower_bound_s": plan.lower_bound_s,
        "num_microbatches": plan.num_microbatches,
        "num_rows": plan.num_rows,
    }


def _peers(shapes: Sequence[GroupShape], case: PlannerCase) -> dict[str, float | int]:
    """Dealt by rows; predicted by our cost model."""
    cost, table = CostModel(), ShapeTable.of(shapes)
    parts = cut_groups(shapes, table, max_rows=case.max_rows, cost=cost)
    rows = [part.num_rows for part in parts]
    rank_s: list[list[float]] = []
    for rank in karmarkar_karp(rows, case.ranks):
        bins = best_fit([rows[item] for item in rank], case.max_rows)
        works = [math.fsum(parts[rank[item]].work_s for item in items) for items in bins]
        rank_s.append(sorted(works, reverse=True))
    num_microbatches = max(len(works) for works in rank_s)
    padded = [works + [0.0] * (num_microbatches - len(works)) for works in rank_s]
    overhead_s = cost.seconds_per_microbatch * num_microbatches
    return {
        "predicted_s": overhead_s + max(math.fsum(works) for works in padded),
        "lockstep_s": overhead_s + math.fsum(max(column) for column in zip(*padded, strict=True)),
        "num_microbatches": num_microbatches,
        "num_rows": sum(rows),
    }


def _lengths(rng: np.random.Generator, median: int, spread: float, size: tuple[int, ...]) -> NDArray[np.int64]:
    return rng.lognormal(math.log(median), spread, size).clip(1, median * _LONGEST).astype(np.int64)
