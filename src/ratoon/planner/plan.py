"""One step's groups onto ranks and microbatches."""

# Shape letters: P prompt tokens, R response tokens, G groups, Q responses of all groups.

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
) -> StepPlan:
    """Cuts one optimizer step into microbatches and deals them to data-parallel ranks.

    groups: those of the whole step, over all ranks.
    max_rows_per_microbatch: token slots of one forward pass of one rank; a part takes P + ΣR of them
        (tokens, not sequences: the prompt counts once for all responses of the part).

    A group that fits a microbatch is kept whole; a larger one is cut by responses into few parts, each
    with the prompt. The plan depends on nothing but its arguments.

    Raises UserError where one prompt and one response exceed the budget, ValueError for a number of
    ranks or rows below 1.
    """
    return plan_shapes(
        [GroupShape.of(group) for group in groups],
        num_ranks=num_ranks,
        max_rows_per_microbatch=max_rows_per_microbatch,
        cost=cost,
    )


def plan_shapes(
    shapes: Sequence[GroupShape],
    *,
    num_ranks: int = 1,
    max_rows_per_microbatch: int = 32_768,
    cost: CostModel = DEFAULT_COST,
) -> StepPlan:
    """`plan_step` from lengths alone: for dry runs and benchmarks."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if max_rows_per_microbatch < 1:
        raise ValueError(f"planner.max_rows_per_microbatch must be positive, got {max_rows_per_microbatch}")
    table = ShapeTable.of(shapes)
    parts = cut_groups(shapes, table, max_rows=max_rows_per_microbatch, cost=cost)
    ranks = balance_ranks([part.work_s for part in parts], num_ranks)
    microbatches = _fill_microbatches([[parts[index] for index in rank] for rank in ranks], max_rows_per_microbatch)

    overhead_s = cost.seconds_per_microbatch
    work_s = [[math.fsum(part.work_s for part in microbatch) for microbatch in rank] for rank in microbatches]
    num_microbatches = len(microbatches[0])
    predicted_s = overhead_s * num_microbatches + max(math.fsum(rank) for rank in work_s)
    lockstep_s = overhead_s * num_microbatches + math.fsum(max(column) for column in zip(*work_s, strict=True))
    lower_bound_s = _lower_bound_s(table, num_ranks, max_rows_per_microbatch, cost)
    return StepPlan(
        assignment=tuple(
            tuple(tuple((part.group_index, part.response_indices) for part in microbatch) for microbatch in rank)
            for rank in microbatches
        ),
        predicted_s=predicted_s,
        # Both hold on paper; one sum rounded in another order may fall a last bit short.
        lockstep_s=max(lockstep_s, predicted_s),
        lower_bound_s=min(lower_bound_s, predicted_s),
        num_rows=sum(part.num_rows for part in parts),
        num_logical_tokens=table.num_logical_tokens,
        num_loss_tokens=int(table.response_tokens_Q.sum()),
        num_sequences=table.response_tokens_Q.size,
    )


def _fill_microbatches(ranks: Sequence[Sequence[Part]], max_rows: int) -> list[list[list[Part]]]:
    """Parts by rank and microbatch: as few microbatches as the fullest rank needs, costliest first on every rank.

    Ranks that need fewer spread their parts over as many, evenly by work where room allows.
    """
    rows = [[part.num_rows for part in rank] for rank in ranks]
    tight = [best_fit(rank_rows, max_rows) for rank_rows in rows]
    num_microbatches = max(len(bins) for bins in tight)
    filled: list[list[list[Part]]] = []
    for rank, rank_rows, rank_tight in zip(ranks, rows, tight, strict=True):
        even = spread(rank_rows, [part.work_s for part in rank], max_rows, num_microbatches)
        bins = rank_tight + [[] for _ in range(num_microbatches - len(rank_tight))] if even is None else even
        microbatches = [[rank[item] for item in sorted(items)] for items in bins]
        filled.append(sorted(microbatches, key=lambda parts: -sum(part.work_s for part in parts)))
    return filled


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
