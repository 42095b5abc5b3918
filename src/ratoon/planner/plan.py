"""One step's groups onto ranks and microbatches."""

# Shape letters: P prompt tokens, R response tokens, G groups, Q responses of all groups.

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ratoon.planner.cost import CostModel
from ratoon.planner.cutting import cut_bundles, cut_groups, even_limit_s
from ratoon.planner.dealing import Parts, Stretch, deal_by_microbatch, deal_by_rank, stretches_of
from ratoon.planner.group_shape import GroupShape, ShapeTable
from ratoon.types.rollouts import RolloutGroup

DEFAULT_COST = CostModel()

PartAssignment = tuple[int, tuple[int, ...]]
"""(group_index, response_indices): the group's prompt and these of its responses."""

Microbatch = tuple[PartAssignment, ...]
"""What one rank packs into one forward pass; empty where it has nothing to do."""

KeptRun = tuple[int, int]
"""[start, stop) of one rank's microbatches that share a kept prompt, stop - start >= 2."""

RanksMeet = Literal["step", "microbatch"]
"""Where ranks wait for one another: once a step, or in every microbatch, as sharded weights make them."""

_BALANCED = 1.01
"""Predicted over lower bound, from which on no group is cut for balance."""

_SHARES = (1.1, 1.0, 1 / 2, 1 / 3, 1 / 4)
"""Of what a rank has between two meetings, if work is shared evenly and each prompt counted once: what a part may cost
at most, tried in turn behind `even_limit_s`. Over 1, because prompts are then repeated."""

_BUNDLE_SHARES = (1.3, *_SHARES)
"""As `_SHARES`, of a bundle: a too large group's prompt is repeated for each rank, and such prompts are long."""

_WORTH_CUTTING = 0.005
"""A plan that repeats prompts for balance must be faster by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Who computes what in one optimizer step, and the denominators that everybody divides by."""

    assignment: tuple[tuple[Microbatch, ...], ...]
    """[rank][microbatch]. Every response of every group once; the same number of microbatches on every rank.

    A rank's microbatches stand in order of falling cost, so that microbatches of one index cost
    about the same on every rank and ranks that meet in each of them wait little. Those of a kept run stand together.
    """

    kept_runs: tuple[tuple[KeptRun, ...], ...]
    """[rank]: ascending, disjoint. Each microbatch of a run is one part of the same group, and the group's prompt is
    computed once for all of them, in a pass of its own before the first; that pass is no microbatch."""

    predicted_s: float
    """Seconds of the slowest rank, if ranks meet only at the step's end."""

    lockstep_s: float
    """Seconds of the step, if ranks meet in every microbatch (as sharded weights make them)."""

    lower_bound_s: float
    """Seconds that no plan can go below: all work shared evenly with every prompt computed once, or the costliest
    single response with its prompt, and the fewest microbatches that the row budget allows."""

    num_rows: int
    """Token slots computed, over every rank and microbatch; a kept prompt's once."""

    num_logical_tokens: int
    """Tokens that separate sequences would hold."""

    num_loss_tokens: int
    """Response tokens of the whole step, over every rank and microbatch."""

    num_sequences: int
    """Responses of the whole step, those without tokens included, over every rank and microbatch."""

    def __post_init__(self) -> None:
        counts = {len(rank) for rank in self.assignment}
        assert len(counts) == 1, f"ranks must run the same number of microbatches, got {sorted(counts)}"
        assert len(self.kept_runs) == len(self.assignment), "kept runs are listed for every rank"
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
    keeps_prompts: bool = False,
) -> StepPlan:
    """Cuts one optimizer step into microbatches and deals them to data-parallel ranks.

    groups: those of the whole step, over all ranks.
    max_rows_per_microbatch: token slots of one forward pass of one rank; a part takes P + ΣR of them
        (tokens, not sequences: the prompt counts once for all responses of the part, and also where it is kept).
    ranks_meet: what is made small: `predicted_s`, or `lockstep_s` for "microbatch".
    keeps_prompts: a rank can compute a prompt once for several microbatches. Parts of one group on one rank then do so
        (`kept_runs`) where it is cheaper than the prompt in each of them, and a group too large for a microbatch stays
        on one rank where that makes no rank slower.

    A group that fits a microbatch is kept whole, unless that leaves ranks more than 1 % above the lower bound and
    cutting it, its prompt repeated for each part, makes the step faster. One that does not fit is cut by
    responses into few parts. The plan depends on nothing but its arguments.

    Raises UserError where one prompt and one response exceed the budget, ValueError for a number of
    ranks or rows below 1, and for kept prompts of ranks that meet in every microbatch.
    """
    return plan_shapes(
        [GroupShape.of(group) for group in groups],
        num_ranks=num_ranks,
        max_rows_per_microbatch=max_rows_per_microbatch,
        cost=cost,
        ranks_meet=ranks_meet,
        keeps_prompts=keeps_prompts,
    )


def plan_shapes(
    shapes: Iterable[GroupShape],
    *,
    num_ranks: int = 1,
    max_rows_per_microbatch: int = 32_768,
    cost: CostModel = DEFAULT_COST,
    ranks_meet: RanksMeet = "step",
    keeps_prompts: bool = False,
) -> StepPlan:
    """`plan_step` from lengths alone: for dry runs and benchmarks."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if max_rows_per_microbatch < 1:
        raise ValueError(f"planner.max_rows_per_microbatch must be positive, got {max_rows_per_microbatch}")
    if keeps_prompts and ranks_meet == "microbatch":
        raise ValueError(
            "keeps_prompts: the pass of a kept prompt is one rank's own, and ranks that meet in every microbatch would "
            "wait for it for ever; leave it out, or plan with ranks_meet='step'"
        )
    if ranks_meet not in get_args(RanksMeet):
        raise ValueError(f"ranks_meet must be 'step' or 'microbatch', got {ranks_meet!r}")
    shapes = list(shapes)
    table = ShapeTable.of(shapes)
    step = _Step(
        shapes=shapes,
        table=table,
        num_ranks=num_ranks,
        max_rows=max_rows_per_microbatch,
        cost=cost,
        lower_bound_s=_lower_bound_s(table, num_ranks, max_rows_per_microbatch, cost),
    )
    ranks = _deal_parts(step, ranks_meet)
    if not keeps_prompts:
        return step.plan(ranks)
    best = step.plan(ranks, keeps_prompts=True)
    has_too_large = bool((table.rows_G > max_rows_per_microbatch).any())
    return _better_in_bundles(step, best) if has_too_large else best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What is planned, and for what."""

    shapes: Sequence[GroupShape]
    table: ShapeTable
    num_ranks: int
    max_rows: int
    cost: CostModel
    lower_bound_s: float

    def deal(self, max_work_s: float, ranks_meet: RanksMeet) -> list[list[Parts]]:
        """Parts by rank and microbatch, each part of at most `max_work_s` where cutting helps."""
        parts = cut_groups(self.shapes, self.table, max_rows=self.max_rows, cost=self.cost, max_work_s=max_work_s)
        ranks = deal_by_microbatch(parts, self.num_ranks, self.max_rows) if ranks_meet == "microbatch" else None
        return ranks or deal_by_rank([(part,) for part in parts], self.cost, self.num_ranks, self.max_rows)

    def deal_bundled(self, max_work_s: float) -> list[list[Parts]]:
        """As `deal`, with the parts that one kept prompt serves on one rank."""
        bundles = cut_bundles(self.shapes, self.table, max_rows=self.max_rows, cost=self.cost, max_work_s=max_work_s)
        return deal_by_rank(bundles, self.cost, self.num_ranks, self.max_rows)

    def limits_s(self, shares: Sequence[float], num_meetings: int) -> Iterator[float]:
        """What a part may cost at most, to try in turn; none where one rank has everything."""
        if self.num_ranks > 1:
            yield even_limit_s(self.table, self.cost, self.num_ranks * num_meetings)
            yield from (share * self.lower_bound_s / num_meetings for share in shares)

    def plan(self, ranks: Sequence[Sequence[Parts]], *, keeps_prompts: bool = False) -> StepPlan:
        """ranks: parts by rank and microbatch, in any order."""
        ordered = [stretches_of(rank, self.cost, keeps_prompts=keeps_prompts) for rank in ranks]
        seconds = [[seconds for stretch in rank for seconds in stretch.seconds] for rank in ordered]
        overhead_s = self.cost.seconds_per_microbatch * len(ranks[0])
        predicted_s = overhead_s + max(math.fsum(rank) for rank in seconds)
        lockstep_s = overhead_s + math.fsum(max(column) for column in zip(*seconds, strict=True))
        return StepPlan(
            assignment=tuple(
                tuple(_assigned(microbatch) for stretch in rank for microbatch in stretch.microbatches)
                for rank in ordered
            ),
            kept_runs=tuple(_kept_runs(rank) for rank in ordered),
            predicted_s=predicted_s,
            # Both hold on paper; one sum rounded in another order may fall a last bit short.
            lockstep_s=max(lockstep_s, predicted_s),
            lower_bound_s=min(self.lower_bound_s, predicted_s),
            num_rows=sum(stretch.num_rows for rank in ordered for stretch in rank),
            num_logical_tokens=self.table.num_logical_tokens,
            num_loss_tokens=int(self.table.response_tokens_Q.sum()),
            num_sequences=self.table.response_tokens_Q.size,
        )


def _deal_parts(step: _Step, ranks_meet: RanksMeet) -> list[list[Parts]]:
    """The best of a few ways, each prompt computed in every microbatch that needs it."""

    def step_s(plan: StepPlan) -> float:
        return plan.predicted_s if ranks_meet == "step" else plan.lockstep_s

    best = step.deal(math.inf, "step")
    best_plan = step.plan(best)
    if ranks_meet == "microbatch":
        even = step.deal(math.inf, "microbatch")
        if step_s(step.plan(even)) < step_s(best_plan):
            best, best_plan = even, step.plan(even)
    num_meetings = 1 if ranks_meet == "step" else max(best_plan.num_microbatches, 1)
    for limit_s in step.limits_s(_SHARES, num_meetings):
        if step_s(best_plan) <= step.lower_bound_s * _BALANCED:
            break
        candidate = step.deal(limit_s, ranks_meet)
        candidate_plan = step.plan(candidate)
        if step_s(candidate_plan) < step_s(best_plan) * (1 - _WORTH_CUTTING):
            best, best_plan = candidate, candidate_plan
    return best


def _better_in_bundles(step: _Step, best: StepPlan) -> StepPlan:
    """A plan that sends the parts of too large groups to ranks together, where it is faster than `best`, or as fast
    with less to compute."""
    for max_work_s in (math.inf, *step.limits_s(_BUNDLE_SHARES, 1)):
        if max_work_s < math.inf and best.predicted_s <= step.lower_bound_s * _BALANCED:
            break
        candidate = step.plan(step.deal_bundled(max_work_s), keeps_prompts=True)
        is_faster = candidate.predicted_s < best.predicted_s * (1 - _WORTH_CUTTING)
        is_leaner = candidate.num_rows < best.num_rows and candidate.predicted_s <= best.predicted_s
        if is_faster or is_leaner:
            best = candidate
    return best


def _assigned(microbatch: Parts) -> Microbatch:
    return tuple((part.group_index, part.response_indices) for part in microbatch)


def _kept_runs(rank: Sequence[Stretch]) -> tuple[KeptRun, ...]:
    runs: list[KeptRun] = []
    start = 0
    for stretch in rank:
        stop = start + len(stretch.microbatches)
        if stretch.is_kept:
            runs.append((start, stop))
        start = stop
    return tuple(runs)


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
