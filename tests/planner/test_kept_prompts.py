"""Step plans for ranks that keep a prompt from one microbatch to the next."""

import math
import time
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.test_plan import (
    FREE_MICROBATCHES,
    ROWS_ONLY,
    Lengths,
    costs,
    heavy_tailed,
    lengths_strategy,
    shapes_of,
)

from ratoon.planner import CostModel, StepPlan, plan_shapes


def check_kept_plan(plan: StepPlan, lengths: Lengths, max_rows: int, cost: CostModel) -> None:
    """Every promise of a plan with kept prompts, recomputed from the lengths."""
    assert {len(rank) for rank in plan.assignment} == {plan.num_microbatches}
    assert len(plan.kept_runs) == plan.num_ranks
    seen: list[tuple[int, int]] = []
    num_rows, rank_s, columns = 0, [], [[0.0] for _ in range(plan.num_microbatches)]
    for rank, runs in zip(plan.assignment, plan.kept_runs, strict=True):
        inside = [index for start, stop in runs for index in range(start, stop)]
        assert inside == sorted(set(inside)), "runs ascend and are disjoint"
        assert all(stop - start >= 2 and start >= 0 and stop <= len(rank) for start, stop in runs)
        for start, stop in runs:
            assert all(len(microbatch) == 1 for microbatch in rank[start:stop]), "nothing else beside the part"
            assert len({microbatch[0][0] for microbatch in rank[start:stop]}) == 1, "of one group"
        own_s = 0.0
        for index, microbatch in enumerate(rank):
            rows, work = 0, 0.0
            for group, responses in microbatch:
                P, Rs = lengths[group]
                seen.extend((group, response) for response in responses)
                rows += P + sum(Rs[response] for response in responses)
                work += cost.part_s(P, [Rs[response] for response in responses])
            assert rows <= max_rows, "a kept prompt takes room in each microbatch"
            if index in inside:
                P = lengths[microbatch[0][0]][0]
                if index in [start for start, _ in runs]:
                    work += cost.seconds_per_microbatch
                else:
                    rows -= P
                    work -= float(cost.prompt_s(P))
            num_rows += rows
            own_s += work
            columns[index].append(work)
        rank_s.append(own_s)
        for start, stop in runs:
            P = lengths[rank[start][0][0]][0]
            assert float(cost.prompt_s(P)) * (stop - start - 1) > cost.seconds_per_microbatch, "kept where cheaper"
    assert sorted(seen) == [(index, response) for index, (_, Rs) in enumerate(lengths) for response in range(len(Rs))]
    overhead_s = plan.num_microbatches * cost.seconds_per_microbatch
    assert plan.predicted_s == pytest.approx(overhead_s + max(rank_s), rel=1e-9)
    assert plan.lockstep_s == pytest.approx(overhead_s + sum(max(column) for column in columns), rel=1e-9)
    assert plan.num_rows == num_rows


@settings(max_examples=300)
@given(lengths_strategy, st.integers(1, 5), st.integers(70, 160), costs)
def test_every_promise_holds(lengths: Lengths, num_ranks: int, max_rows: int, cost: CostModel):
    """And no plan is slower than the one without kept prompts, or faster than what no plan can beat."""
    shapes = shapes_of(lengths)
    kept = plan_shapes(shapes, num_ranks=num_ranks, max_rows_per_microbatch=max_rows, cost=cost, keeps_prompts=True)
    check_kept_plan(kept, lengths, max_rows, cost)
    repeated = plan_shapes(shapes, num_ranks=num_ranks, max_rows_per_microbatch=max_rows, cost=cost)
    assert repeated.kept_runs == ((),) * num_ranks
    assert kept.predicted_s <= repeated.predicted_s * (1 + 1e-12)
    assert kept.predicted_s >= repeated.lower_bound_s * (1 - 1e-9)
    if not any(kept.kept_runs) and all(P + sum(Rs) <= max_rows for P, Rs in lengths):
        assert kept == repeated


@given(
    st.lists(
        st.tuples(st.integers(20, 60), st.lists(st.integers(20, 40), min_size=6, max_size=9)), min_size=1, max_size=4
    ),
    st.sampled_from([ROWS_ONLY, FREE_MICROBATCHES]),
)
def test_one_rank_computes_each_prompt_once(lengths: Lengths, cost: CostModel):
    """Where a pass costs nothing and every group is too large for one."""
    plan = plan_shapes(shapes_of(lengths), max_rows_per_microbatch=130, cost=cost, keeps_prompts=True)
    assert plan.num_rows == sum(P + sum(Rs) for P, Rs in lengths)
    assert sum(stop - start for start, stop in plan.kept_runs[0]) == plan.num_microbatches
    assert plan.predicted_s == pytest.approx(plan.lower_bound_s, rel=1e-9)


def test_a_group_too_large_for_a_microbatch_keeps_its_prompt():
    lengths = [(16_384, [4096] * 64)]
    plan = plan_shapes(shapes_of(lengths), max_rows_per_microbatch=16_384 + 10 * 4096, keeps_prompts=True)
    assert plan.kept_runs == (((0, 7),),)
    assert sorted(len(microbatch[0][1]) for microbatch in plan.assignment[0]) == [9, 9, 9, 9, 9, 9, 10]
    assert plan.num_rows == 16_384 + 64 * 4096
    assert plan.dedup_ratio == 64 * (16_384 + 4096) / plan.num_rows


def test_a_prompt_is_kept_only_where_its_pass_is_cheaper():
    """Two parts: the prompt again, or a pass of its own."""
    shapes = shapes_of([(10, [40, 40])])
    for pass_s, is_kept in ((9.0, True), (10.0, False), (11.0, False)):
        cost = CostModel(seconds_per_row=1.0, seconds_per_scored_token=0.0, attention=(), seconds_per_microbatch=pass_s)
        plan = plan_shapes(shapes, max_rows_per_microbatch=50, cost=cost, keeps_prompts=True)
        assert plan.kept_runs == (((0, 2),) if is_kept else (),)
        assert plan.predicted_s == (90 + 3 * pass_s if is_kept else 100 + 2 * pass_s)
        assert plan.num_rows == (90 if is_kept else 100)


def test_too_large_groups_each_go_to_one_rank_where_that_balances():
    plan = plan_shapes(
        shapes_of([(100, [50] * 4)] * 3), num_ranks=3, max_rows_per_microbatch=200, cost=ROWS_ONLY, keeps_prompts=True
    )
    assert plan.kept_runs == (((0, 2),),) * 3
    assert [{group for ((group, _),) in rank} for rank in plan.assignment] == [{0}, {1}, {2}]
    assert (plan.predicted_s, plan.num_rows) == (300.0, 900)


def test_one_too_large_group_is_shared_out_where_other_ranks_would_idle():
    shapes = shapes_of([(10, [100] * 8)])
    plan = plan_shapes(shapes, num_ranks=4, max_rows_per_microbatch=110, cost=ROWS_ONLY, keeps_prompts=True)
    assert plan.kept_runs == (((0, 2),),) * 4, "each rank has two microbatches and one prompt"
    assert (plan.predicted_s, plan.num_rows) == (210.0, 840)
    long_prompt = plan_shapes(
        shapes_of([(16_384, [4096] * 64)]), num_ranks=8, max_rows_per_microbatch=57_344, keeps_prompts=True
    )
    assert [len(rank[0][0][1]) for rank in long_prompt.assignment] == [8] * 8


def test_a_kept_run_stands_beside_microbatches_of_other_groups():
    lengths = [(50, [40] * 5), (10, [20, 20]), (10, [5]), (7, [30])]
    plan = plan_shapes(shapes_of(lengths), max_rows_per_microbatch=130, cost=ROWS_ONLY, keeps_prompts=True)
    check_kept_plan(plan, lengths, 130, ROWS_ONLY)
    ((run,),) = plan.kept_runs
    assert {plan.assignment[0][index][0][0] for index in range(*run)} == {0}
    assert (plan.predicted_s, plan.num_microbatches) == (250 + 50 + 15 + 37, 4)


@pytest.mark.parametrize("keeps_prompts", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_responses_without_cost_are_planned(num_ranks: int, keeps_prompts: bool):
    """Empty ones beside an unbalanced step."""
    plan = plan_shapes(
        shapes_of([(30, [0, 0]), (30, [0]), (30, [0])]),
        num_ranks=num_ranks, cost=ROWS_ONLY, keeps_prompts=keeps_prompts,
    )  # fmt: skip
    assert (plan.num_rows, plan.num_sequences) == (90, 4)
    assert plan.predicted_s == 30 * math.ceil(3 / num_ranks)


def test_ranks_that_meet_in_every_microbatch_keep_no_prompt():
    meet: Literal["microbatch"] = "microbatch"
    with pytest.raises(ValueError, match="plan with ranks_meet='step'"):
        plan_shapes(shapes_of([(10, [5])]), ranks_meet=meet, keeps_prompts=True)


@pytest.mark.parametrize("num_ranks", [1, 8, 1024])
def test_ten_thousand_heavy_tailed_groups(num_ranks: int):
    """Within 2 % of the lower bound, planned in less than 2 s on one core; some groups are too large."""
    shapes = heavy_tailed(10_000, 8)
    start = time.process_time()
    plan = plan_shapes(shapes, num_ranks=num_ranks, max_rows_per_microbatch=24_000, keeps_prompts=True)
    assert time.process_time() - start < 2.0
    assert plan.imbalance <= 1.02
