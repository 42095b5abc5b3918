"""One step's groups onto ranks and microbatches."""

# Shape letters: P prompt tokens, R response tokens, G groups, Q responses of all groups.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ratoon.planner.balancing import balance_ranks
from ratoon.planner.binning import best_fit, spread
from ratoon.planner.cost import CostModel
from ratoon.planner.cutting import Part, cut_groups
from ratoon.planner.group_shape import GroupShape, ShapeTable
from ratoon.types.rollouts import RolloutGroup

DEFAULT_COST = CostModel()

PartAssignment = tuple[int, tuple[int, ...]]
"""(group_index, response_indices): the group's prompt and these of its responses."""

Microbatch = tuple[PartAssignment, ...]
"""What one rank packs into one forward pass; empty where it has nothing to do."""

RanksMeet = Literal["step", "microbatch"]
"""Where ranks wait for one another: once a step, or in every microbatch, as sharded weights make them."""

_BALANCED = 1.01
"""Predicted over lower bound, from which on no group is cut for balance."""

_SHARES = (1.1, 1.0, 1 / 2, 1 / 3, 1 / 4)
"""Of what a rank has between two meetings, if work is shared evenly: what a part may cost at most, tried in turn.
Over 1, because prompts are then repeated."""

_WORTH_CUTTING = 0.005
"""A plan that repeats prompts for balance must be faster by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who computes what in one optimizer step, and the denominators that everybody divides by."""

    assignment: tuple[tuple[Microbatch, ...], ...]
    """[rank][microbatch]. Every response of every group once; the same number of microbatches on every rank.

    A rank's microbatches stand in order of falling cost, so that microbatches of one index cost
    about the same on every rank and ranks that meet in each of them wait little.
    """

    predicted_s: float
    """Seconds of the slowest rank, if ranks meet only at the step's end."""

    lockstep_s: float
    """Seconds of the step, if ranks meet in every microbatch (as sharded weights make them)."""

    lower_bound_s: float
    """Seconds that no plan can go below: all work shared evenly with every prompt computed once, or the costliest
    single response with its prompt, and the fewest microbatches that the row budget allows."""

    num_rows: int
    """Token slots computed, over every rank and microbatch."""

    num_logical_tokens: int
    """Tokens that separate sequences would hold."""

    num_loss_tokens: int
    """Response tokens of the whole step, over every rank and microbatch."""

    num_sequences: int
    """Responses of the whole step, those without tokens included, over every rank and microbatch."""

    def __post_init__(self) -> None:
        counts = {len(rank) for rank in self.assignment}
        assert len(counts) == 1, f"ranks must run the same number of microbatches, got {sorted(counts)}"
        assert self.lower_bound_s <= self.predicted_s <= self.lockstep_s, (
            f"predictions out of order: {self.lower_bound_s}, {self.predicted_s}, {self.lockstep_s}"
        )

    @property
    def num_ranks(self) -> int:
        return len(self.assignment)

    @property
    def num_microbatches(self) -> int:
        """Of each rank."""
        return len(self.assignment[0])

    @property
    def dedup_ratio(self) -> float:
        """Logical tokens over computed rows; 1 where there are none."""
        return self.num_logical_tokens / self.num_rows if self.num_rows else 1.0

    @property
    def imbalance(self) -> float:
        """Predicted over lower bound, >= 1; 1 where nothing costs anything."""
        return self.predicted_s / self.lower_bound_s if self.lower_bound_s else 1.0


def plan_step(
    groups: Sequence[RolloutGroup],
    *,
    num_ranks: int = 1,
    max_rows_per_microbatch: int = 32_768,
    cost: CostModel = DEFAULT_COST,
    ranks_meet: RanksMeet = "step",
) -> StepPlan:
    """Cuts one optimizer step into microbatches and deals them to data-parallel ranks.

    groups: those of the whole step, over all ranks.
    max_rows_per_microbatch: token slots of one forward pass of one rank; a part takes P + ΣR of them
        (tokens, not sequences: the prompt counts once for all responses of the part).
    ranks_meet: what is made small: `predicted_s`, or `lockstep_s` for "microbatch".

    A group that fits a microbatch is kept whole, unless that leaves ranks more than 1 % above the lower bound and
    cutting it, its prompt repeated for each part, makes the step faster. One that does not fit is cut by
    responses into few parts. The plan depends on nothing but its arguments.

    Raises UserError where one prompt and one response exceed the budget, ValueError for a number of
    ranks or rows below 1.
    """
    return plan_shapes(
        [GroupShape.of(group) for group in groups],
        num_ranks=num_ranks,
        max_rows_per_microbatch=max_rows_per_microbatch,
        cost=cost,
        ranks_meet=ranks_meet,
    )


def plan_shapes(
    shapes: Sequence[GroupShape],
    *,
    num_ranks: int = 1,
    max_rows_per_microbatch: int = 32_768,
    cost: CostModel = DEFAULT_COST,
    ranks_meet: RanksMeet = "step",
) -> StepPlan:
    """`plan_step` from lengths alone: for dry runs and benchmarks."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if max_rows_per_microbatch < 1:
        raise ValueError(f"planner.max_rows_per_microbatch must be positive, got {max_rows_per_microbatch}")
    table = ShapeTable.of(shapes)
    bound_s = _lower_bound_s(table, num_ranks, max_rows_per_microbatch, cost)

    def plan(max_work_s: float, meet: RanksMeet) -> StepPlan:
        parts = cut_groups(shapes, table, max_rows=max_rows_per_microbatch, cost=cost, max_work_s=max_work_s)
        ranks = _deal_by_microbatch(parts, num_ranks, max_rows_per_microbatch) if meet == "microbatch" else None
        return _plan(ranks or _deal_by_rank(parts, num_ranks, max_rows_per_microbatch), table, bound_s, cost)

    def step_s(candidate: StepPlan) -> float:
        return candidate.predicted_s if ranks_meet == "step" else candidate.lockstep_s

    best = plan(math.inf, "step")
    if ranks_meet == "microbatch":
        best = min(best, plan(math.inf, "microbatch"), key=step_s)
    even_s = bound_s if ranks_meet == "step" else bound_s / max(best.num_microbatches, 1)
    for share in _SHARES if num_ranks > 1 else ():
        if step_s(best) <= bound_s * _BALANCED:
            break
        candidate = plan(share * even_s, ranks_meet)
        if step_s(candidate) < step_s(best) * (1 - _WORTH_CUTTING):
            best = candidate
    return best


def _plan(ranks: list[list[list[Part]]], table: ShapeTable, lower_bound_s: float, cost: CostModel) -> StepPlan:
    """ranks: parts by rank and microbatch."""
    work_s = [[math.fsum(part.work_s for part in microbatch) for microbatch in rank] for rank in ranks]
    overhead_s = cost.seconds_per_microbatch * len(ranks[0])
    predicted_s = overhead_s + max(math.fsum(rank) for rank in work_s)
    lockstep_s = overhead_s + math.fsum(max(column) for column in zip(*work_s, strict=True))
    return StepPlan(
        assignment=tuple(
            tuple(tuple((part.group_index, part.response_indices) for part in microbatch) for microbatch in rank)
            for rank in ranks
        ),
        predicted_s=predicted_s,
        # Both hold on paper; one sum rounded in another order may fall a last bit short.
        lockstep_s=max(lockstep_s, predicted_s),
        lower_bound_s=min(lower_bound_s, predicted_s),
        num_rows=sum(part.num_rows for rank in ranks for microbatch in rank for part in microbatch),
        num_logical_tokens=table.num_logical_tokens,
        num_loss_tokens=int(table.response_tokens_Q.sum()),
        num_sequences=table.response_tokens_Q.size,
    )


def _deal_by_rank(parts: Sequence[Part], num_ranks: int, max_rows: int) -> list[list[list[Part]]]:
    """Parts by rank and microbatch: ranks balanced first, then as few microbatches as the fullest needs.

    Costliest first on every rank. Ranks that need fewer spread their parts over as many, evenly by work where room
    allows.
    """
    dealt = balance_ranks([part.work_s for part in parts], num_ranks)
    ranks = [[parts[index] for index in rank] for rank in dealt]
    rows = [[part.num_rows for part in rank] for rank in ranks]
    tight = [best_fit(rank_rows, max_rows) for rank_rows in rows]
    num_microbatches = max(len(bins) for bins in tight)
    filled: list[list[list[Part]]] = []
    for rank, rank_rows, rank_tight in zip(ranks, rows, tight, strict=True):
        even = spread(rank_rows, [part.work_s for part in rank], max_rows, num_microbatches)
        bins = rank_tight + [[] for _ in range(num_microbatches - len(rank_tight))] if even is None else even
        microbatches = [[rank[item] for item in sorted(items)] for items in bins]
        filled.append(sorted(microbatches, key=_work_s, reverse=True))
    return filled


def _deal_by_microbatch(parts: Sequence[Part], num_ranks: int, max_rows: int) -> list[list[list[Part]]] | None:
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
    microbatches = sorted(([parts[item] for item in sorted(items)] for items in bins), key=_work_s, reverse=True)
    ranks: list[list[list[Part]]] = [[] for _ in range(num_ranks)]
    loads_s = np.zeros(num_ranks)
    for first in range(0, len(microbatches), num_ranks):
        column = microbatches[first : first + num_ranks]
        lightest_first: list[int] = np.argsort(loads_s, kind="stable").tolist()
        for microbatch, rank in zip(column, lightest_first, strict=True):
            ranks[rank].append(microbatch)
            loads_s[rank] += _work_s(microbatch)
    return ranks


def _counts_from(fewest: int) -> list[int]:
    """Numbers of microbatches to try: 2 % apart where there are many."""
    counts = [max(fewest, 1)]
    while counts[-1] < 2 * counts[0]:
        counts.append(math.ceil(counts[-1] * 1.02) + (counts[-1] < 50))
    return counts


def _work_s(microbatch: Sequence[Part]) -> float:
    return math.fsum(part.work_s for part in microbatch)


def _lower_bound_s(table: ShapeTable, num_ranks: int, max_rows: int, cost: CostModel) -> float:
    """What no assignment of responses to ranks can beat, groups cut or whole."""
    if table.response_tokens_Q.size == 0:
        return 0.0
    P_Q = table.prompt_tokens_G[table.group_of_Q]
    response_s_Q = cost.response_s(P_Q, table.response_tokens_Q)
    prompts_once_s = math.fsum(cost.prompt_s(table.prompt_tokens_G[table.group_sizes_G > 0]).tolist())
    even_share_s = (prompts_once_s + math.fsum(response_s_Q.tolist())) / num_ranks
    costliest_s = float((cost.prompt_s(P_Q) + response_s_Q).max())
    fewest_microbatches = -(-int(table.rows_G.sum()) // (num_ranks * max_rows))
    return max(even_share_s, costliest_s) + cost.seconds_per_microbatch * fewest_microbatches
