"""Step plans: exact cover, equal counts, the budget, and how near they come to the best."""

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ratoon.layout import pack_groups
from ratoon.planner import CostModel, GroupShape, PlannerConfig, StepPlan, WindowCost, plan_shapes, plan_step
from ratoon.planner.cutting import even_limit_s
from ratoon.planner.group_shape import ShapeTable
from ratoon.types import Prompt, Response, RolloutGroup

FREE_MICROBATCHES = CostModel(seconds_per_microbatch=0.0)
ROWS_ONLY = CostModel(
    seconds_per_row=1.0, seconds_per_scored_token=0.0, attention=(WindowCost(None, 0.0),), seconds_per_microbatch=0.0
)

Lengths = list[tuple[int, list[int]]]
lengths_strategy = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 40), max_size=7)), max_size=12)
costs = st.sampled_from(
    [
        CostModel(),
        ROWS_ONLY,
        FREE_MICROBATCHES,
        CostModel(attention=(WindowCost(4, 1e-3), WindowCost(None, 1e-5))),
        CostModel(seconds_per_microbatch=10.0),
    ]
)


def shapes_of(lengths: Lengths) -> list[GroupShape]:
    return [
        GroupShape(prompt_id=index, num_prompt_tokens=P, response_lengths=tuple(Rs))
        for index, (P, Rs) in enumerate(lengths)
    ]


def groups_of(lengths: Lengths) -> list[RolloutGroup]:
    return [
        RolloutGroup(Prompt(index, np.full(P, index)), tuple(Response(np.full(R, 7)) for R in Rs))
        for index, (P, Rs) in enumerate(lengths)
    ]


def check_plan(plan: StepPlan, lengths: Lengths, num_ranks: int, max_rows: int, cost: CostModel) -> None:
    """Everything a plan promises, recomputed from the lengths."""
    assert plan.num_ranks == len(plan.assignment) == num_ranks
    assert {len(rank) for rank in plan.assignment} == {plan.num_microbatches}
    seen: list[tuple[int, int]] = []
    num_rows, rank_s, column_s = 0, [], [0.0] * plan.num_microbatches
    for rank in plan.assignment:
        works: list[float] = []
        for microbatch in rank:
            rows, work = 0, 0.0
            for group_index, response_indices in microbatch:
                P, Rs = lengths[group_index]
                assert response_indices, "a part without responses"
                assert list(response_indices) == sorted(response_indices)
                seen.extend((group_index, response) for response in response_indices)
                rows += P + sum(Rs[response] for response in response_indices)
                work += cost.part_s(P, [Rs[response] for response in response_indices])
            assert rows <= max_rows
            indices = [index for index, _ in microbatch]
            assert indices == sorted(set(indices)), "a prompt is computed once in a microbatch"
            num_rows += rows
            works.append(work)
        assert works == pytest.approx(sorted(works, reverse=True), rel=1e-9, abs=1e-15), "falling cost within a rank"
        rank_s.append(sum(works))
        column_s = [max(one, other) for one, other in zip(column_s, works, strict=True)]

    everything = [(index, response) for index, (_, Rs) in enumerate(lengths) for response in range(len(Rs))]
    assert sorted(seen) == everything
    overhead_s = plan.num_microbatches * cost.seconds_per_microbatch
    assert plan.predicted_s == pytest.approx(max(rank_s) + overhead_s, rel=1e-9)
    assert plan.lockstep_s == pytest.approx(sum(column_s) + overhead_s, rel=1e-9)
    assert plan.lower_bound_s <= plan.predicted_s <= plan.lockstep_s
    assert plan.imbalance >= 1.0
    assert plan.num_rows == num_rows
    assert plan.num_sequences == len(everything)
    assert plan.num_loss_tokens == sum(sum(Rs) for _, Rs in lengths)
    logical = sum(len(Rs) * P + sum(Rs) for P, Rs in lengths)
    assert plan.dedup_ratio == pytest.approx(logical / num_rows if num_rows else 1.0)


@settings(max_examples=300)
@given(lengths_strategy, st.integers(1, 9), st.integers(70, 400), costs, st.sampled_from(["step", "microbatch"]))
def test_every_promise_holds(
    lengths: Lengths, num_ranks: int, max_rows: int, cost: CostModel, ranks_meet: Literal["step", "microbatch"]
):
    """verl#559, verl#833: sizes that do not divide one another were an error, or NaN."""
    plan = plan_shapes(
        shapes_of(lengths), num_ranks=num_ranks, max_rows_per_microbatch=max_rows, cost=cost, ranks_meet=ranks_meet
    )
    check_plan(plan, lengths, num_ranks, max_rows, cost)


@given(lengths_strategy, st.integers(70, 200))
def test_a_group_that_fits_is_kept_whole_on_one_rank(lengths: Lengths, max_rows: int):
    plan = plan_shapes(shapes_of(lengths), max_rows_per_microbatch=max_rows)
    parts = [part for rank in plan.assignment for microbatch in rank for part in microbatch]
    for index, (P, Rs) in enumerate(lengths):
        num_parts = sum(group_index == index for group_index, _ in parts)
        if P + sum(Rs) <= max_rows:
            assert num_parts == (1 if Rs else 0)
        else:
            assert num_parts >= 2


@given(lengths_strategy, st.integers(1, 4), st.integers(70, 200))
def test_planned_rows_are_packed_rows(lengths: Lengths, num_ranks: int, max_rows: int):
    """The units of the budget (verl#1524, verl#180): rows that `pack_groups` stores, prompt once for each part.
    Arctic#84, Arctic#41: rows were padded to the configured maxima."""
    groups = groups_of(lengths)
    plan = plan_step(groups, num_ranks=num_ranks, max_rows_per_microbatch=max_rows)
    layouts = [
        pack_groups([groups[index].select(responses) for index, responses in microbatch])
        for rank in plan.assignment
        for microbatch in rank
    ]
    assert all(layout.num_rows <= max_rows for layout in layouts)
    assert sum(layout.num_rows for layout in layouts) == plan.num_rows
    assert sum(layout.num_scored for layout in layouts) == plan.num_loss_tokens
    assert sum(layout.num_logical_tokens for layout in layouts) == plan.num_logical_tokens


def test_the_budget_counts_rows_not_sequences():
    shapes = shapes_of([(10, [5, 5, 5, 5])])
    assert plan_shapes(shapes, max_rows_per_microbatch=30).assignment == ((((0, (0, 1, 2, 3)),),),)
    cut = plan_shapes(shapes, max_rows_per_microbatch=29)
    assert cut.num_microbatches == 2
    assert cut.num_rows == 40
    assert cut.dedup_ratio == 60 / 40


def best_whole_group_work(works: Sequence[float], num_ranks: int) -> float:
    """The lightest heaviest rank, by trying every assignment."""
    return min(
        max(sum(work for work, at in zip(works, where, strict=True) if at == rank) for rank in range(num_ranks))
        for where in itertools.product(range(num_ranks), repeat=len(works))
    )


def num_parts_of(plan: StepPlan) -> int:
    return sum(len(microbatch) for rank in plan.assignment for microbatch in rank)


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=1, max_size=6
    ),
    st.integers(1, 3),
    st.sampled_from([ROWS_ONLY, FREE_MICROBATCHES]),
)
def test_close_to_the_best_plan_of_whole_groups(lengths: Lengths, num_ranks: int, cost: CostModel):
    """Within 4/3 - 1/(3 ranks) (LPT's bound) of the optimum found by trying everything; better where groups are cut."""
    plan = plan_shapes(shapes_of(lengths), num_ranks=num_ranks, max_rows_per_microbatch=10_000, cost=cost)
    best_s = best_whole_group_work([cost.part_s(P, Rs) for P, Rs in lengths], num_ranks)
    if num_parts_of(plan) == len(lengths):
        assert best_s <= plan.predicted_s * (1 + 1e-9)
    assert plan.predicted_s <= best_s * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-9)


def test_trades_find_what_longest_first_misses():
    """LPT gives 7 + 5 + ... = 11 on one rank; 9 on each is possible."""
    shapes = shapes_of([(size - 1, [1]) for size in (5, 5, 4, 4, 3, 3, 3)])
    plan = plan_shapes(shapes, num_ranks=3, cost=ROWS_ONLY)
    assert plan.predicted_s == 9


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=3)), max_size=3),
    st.integers(1, 2),
    st.integers(18, 40),
    st.floats(0, 20),
)
def test_no_plan_at_all_beats_the_lower_bound(lengths: Lengths, num_ranks: int, max_rows: int, overhead_s: float):
    """Every assignment of single responses to (rank, microbatch), groups cut or whole, costs at least the bound."""
    cost = CostModel(
        seconds_per_row=1.0,
        seconds_per_scored_token=0.5,
        attention=(WindowCost(None, 0.1),),
        seconds_per_microbatch=overhead_s,
    )
    bound_s = plan_shapes(
        shapes_of(lengths), num_ranks=num_ranks, max_rows_per_microbatch=max_rows, cost=cost
    ).lower_bound_s
    responses = [(index, R) for index, (_, Rs) in enumerate(lengths) for R in Rs]
    assume(len(responses) <= 5)
    for num_microbatches in (1, 2):
        bins = list(itertools.product(range(num_ranks), range(num_microbatches)))
        for where in itertools.product(bins, repeat=len(responses)):
            parts: dict[tuple[int, int, int], list[int]] = {}
            for (index, R), (rank, microbatch) in zip(responses, where, strict=True):
                parts.setdefault((rank, microbatch, index), []).append(R)
            rows, seconds = dict.fromkeys(bins, 0), [overhead_s * num_microbatches] * num_ranks
            for (rank, microbatch, index), Rs in parts.items():
                rows[rank, microbatch] += lengths[index][0] + sum(Rs)
                seconds[rank] += cost.part_s(lengths[index][0], Rs)
            if max(rows.values()) <= max_rows:
                assert bound_s <= max(seconds) * (1 + 1e-9)


def fewest_parts(lengths: Sequence[int], room: int) -> int:
    """By trying every assignment of responses to parts."""
    for num_parts in itertools.count(1):
        for where in itertools.product(range(num_parts), repeat=len(lengths)):
            loads = [0] * num_parts
            for length, part in zip(lengths, where, strict=True):
                loads[part] += length
            if max(loads) <= room:
                return num_parts
    raise AssertionError("unreachable")


@settings(max_examples=50)
@given(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=2, max_size=6), st.integers(30, 60))
def test_an_oversized_group_is_cut_into_few_parts(P: int, lengths: list[int], room: int):
    """Within best-fit decreasing's 11/9 of the fewest, plus 6/9: exact up to two parts of three."""
    plan = plan_shapes(shapes_of([(P, lengths)]), max_rows_per_microbatch=P + room)
    assert plan.num_microbatches <= 11 / 9 * fewest_parts(lengths, room) + 6 / 9


def test_an_oversized_group_is_cut_evenly():
    plan = plan_shapes(shapes_of([(100, [50] * 16)]), max_rows_per_microbatch=100 + 50 * 6)
    sizes = [len(responses) for microbatch in plan.assignment[0] for _, responses in microbatch]
    assert sorted(sizes) == [5, 5, 6]


def test_a_group_is_cut_where_ranks_would_idle():
    """One prompt repeated on each of four ranks, against three ranks that wait for the one with the group."""
    plan = plan_shapes(shapes_of([(10, [100] * 8)]), num_ranks=4, cost=ROWS_ONLY)
    assert [[responses for _, responses in rank[0]] for rank in plan.assignment] == [
        [(0, 4)], [(1, 5)], [(2, 6)], [(3, 7)]
    ]  # fmt: skip
    assert (plan.predicted_s, plan.num_rows) == (210.0, 840)
    shared = plan_shapes(shapes_of([(100, [900] * 4)] * 3), num_ranks=2, cost=ROWS_ONLY)
    assert shared.predicted_s < 1.05 * shared.lower_bound_s, "three groups for two ranks: one is shared"


@pytest.mark.parametrize("ranks_meet", ["step", "microbatch"])
@pytest.mark.parametrize(
    ("num_ranks", "N", "P", "R"),
    [
        (3, 6, 2000, 400),
        (3, 16, 8000, 400),
        (4, 16, 2000, 500),
        (6, 16, 4000, 500),
        (7, 16, 4000, 500),
        (8, 16, 2000, 500),
    ],
)
def test_one_long_prompt_is_repeated_once_for_each_rank(
    num_ranks: int, N: int, P: int, R: int, ranks_meet: Literal["step", "microbatch"]
):
    """As many parts as ranks. More, in one microbatch, would compute the prompt twice there; none would let ranks
    wait."""
    plan = plan_shapes(shapes_of([(P, [R] * N)]), num_ranks=num_ranks, ranks_meet=ranks_meet)
    evenly = CostModel().part_s(P, [R] * -(-N // num_ranks)) + CostModel().seconds_per_microbatch
    assert plan.predicted_s == pytest.approx(evenly, rel=1e-9)
    assert plan.num_rows == num_ranks * P + N * R


@given(
    st.lists(st.tuples(st.integers(1, 3_000), st.lists(st.integers(0, 900), max_size=8)), max_size=6),
    st.integers(1, 9),
)
def test_the_even_limit_is_the_least_that_is_enough(lengths: Lengths, num_shares: int):
    shapes, cost = shapes_of(lengths), CostModel()
    table = ShapeTable.of(shapes)

    def share_s(limit_s: float) -> float:
        total_s = 0.0
        for P, Rs in lengths:
            prompt_s, responses_s = cost.part_s(P, []), [cost.part_s(P, [R]) - cost.part_s(P, []) for R in Rs]
            whole_s = prompt_s + sum(responses_s)
            room_s = max(limit_s - prompt_s, *responses_s) if Rs else 0.0
            parts = (
                math.ceil(sum(responses_s) / room_s - 1e-9) if Rs and whole_s > limit_s and room_s > 0 else len(Rs[:1])
            )
            total_s += parts * prompt_s + sum(responses_s)
        return total_s / num_shares

    limit_s = even_limit_s(table, cost, num_shares)
    assert share_s(limit_s * (1 + 1e-6)) <= limit_s * (1 + 1e-6) + 1e-12
    assert limit_s < 1e-9 or share_s(limit_s * (1 - 1e-3)) > limit_s * (1 - 1e-3)


def test_no_prompt_is_repeated_where_it_costs_more_than_waiting():
    plan = plan_shapes(shapes_of([(10_000, [10] * 8)]), num_ranks=4, cost=ROWS_ONLY)
    assert num_parts_of(plan) == 1
    balanced = plan_shapes(shapes_of([(50, [10] * 8)] * 400), num_ranks=4)
    assert num_parts_of(balanced) == 400, "nor where whole groups balance"


def test_ranks_that_meet_in_every_microbatch_wait_less():
    """What is made small is the sum over microbatches of the slowest rank in each."""
    shapes = heavy_tailed(2_000, 8)
    by_step, by_microbatch = (plan_shapes(shapes, num_ranks=64, ranks_meet=meet) for meet in ("step", "microbatch"))
    assert by_step.imbalance <= 1.01
    assert by_microbatch.lockstep_s < by_step.lockstep_s
    assert by_microbatch.lockstep_s <= 1.05 * by_microbatch.lower_bound_s


def test_empty_responses_make_no_part_of_their_own():
    plan = plan_shapes(shapes_of([(10, [8, 0, 8, 0, 8])]), max_rows_per_microbatch=26)
    parts = [responses for microbatch in plan.assignment[0] for _, responses in microbatch]
    assert len(parts) == 2
    assert sorted(response for part in parts for response in part) == [0, 1, 2, 3, 4]
    # Room for exactly the prompt and its tokens: the empty one costs nothing.
    whole = plan_shapes(shapes_of([(10, [8, 0, 8])]), max_rows_per_microbatch=26)
    assert whole.assignment == ((((0, (0, 1, 2)),),),)


def test_a_group_of_only_empty_responses_is_assigned():
    """Covers verl#6310: a response of length zero keeps its place and counts as a sequence."""
    plan = plan_shapes(shapes_of([(10, [0, 0]), (5, [])]), num_ranks=2)
    assert plan.assignment == ((((0, (0, 1)),),), ((),))
    assert (plan.num_sequences, plan.num_loss_tokens, plan.num_rows) == (2, 0, 10)


@pytest.mark.parametrize("lengths", [[], [(5, [])], [(5, []), (1, [])]])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_to_do_is_no_microbatch(lengths: Lengths, num_ranks: int):
    plan = plan_shapes(shapes_of(lengths), num_ranks=num_ranks)
    assert plan.assignment == ((),) * num_ranks
    assert (plan.num_microbatches, plan.num_rows, plan.predicted_s, plan.lower_bound_s) == (0, 0, 0.0, 0.0)
    assert (plan.dedup_ratio, plan.imbalance) == (1.0, 1.0)


def test_idle_ranks_run_as_many_microbatches_as_the_others():
    """Covers verl#5591 (ranks get different micro-batch counts and deadlock)."""
    plan = plan_shapes(shapes_of([(10, [5]), (10, [50, 50, 50])]), num_ranks=7, max_rows_per_microbatch=60)
    assert plan.num_microbatches == 1
    assert sum(rank == ((),) for rank in plan.assignment) == 3
    tight = plan_shapes(shapes_of([(10, [50])] * 5), num_ranks=2, max_rows_per_microbatch=60)
    assert [len(rank) for rank in tight.assignment] == [3, 3]
    assert sorted(len(microbatch) for rank in tight.assignment for microbatch in rank) == [0, 1, 1, 1, 1, 1]


def test_microbatches_of_one_index_cost_about_the_same():
    rng = np.random.default_rng(0)
    lengths = [(500, rng.integers(1, 2000, 8).tolist()) for _ in range(512)]
    plan = plan_shapes(shapes_of(lengths), num_ranks=8)
    assert plan.lockstep_s <= 1.05 * plan.predicted_s


def test_a_response_over_the_budget_is_named():
    shapes = [GroupShape(prompt_id="math/17", num_prompt_tokens=1000, response_lengths=(10, 9001, 0))]
    with pytest.raises(ValueError, match="math/17") as error:
        plan_shapes(shapes, max_rows_per_microbatch=10_000)
    message = str(error.value)
    assert "1,000 tokens and a response of 9,001" in message
    assert "planner.max_rows_per_microbatch=10,000" in message
    assert "raise the limit" in message
    plan_shapes(shapes, max_rows_per_microbatch=10_001)


def test_a_prompt_over_the_budget_is_named_even_with_empty_responses():
    with pytest.raises(ValueError, match="prompt 0 has 11 tokens"):
        plan_shapes(shapes_of([(11, [0])]), max_rows_per_microbatch=10)


def test_a_meeting_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="ranks_meet must be 'step' or 'microbatch', got 'epoch'"):
        plan_shapes([], ranks_meet=cast(Any, "epoch"))


def test_shapes_may_come_one_by_one():
    shapes = shapes_of([(5, [3, 4]), (7, [1])])
    assert plan_shapes(iter(shapes), num_ranks=2) == plan_shapes(shapes, num_ranks=2)


@pytest.mark.parametrize(("num_ranks", "max_rows"), [(0, 10), (-1, 10), (1, 0), (1, -5)])
def test_nonsense_sizes_are_refused(num_ranks: int, max_rows: int):
    with pytest.raises(ValueError, match=r"got (0|-1|-5)"):
        plan_shapes([], num_ranks=num_ranks, max_rows_per_microbatch=max_rows)


@given(st.integers(-1, 0))
def test_nonsense_lengths_are_refused(P: int):
    with pytest.raises(ValueError, match="at least 1 prompt token"):
        GroupShape(prompt_id="p", num_prompt_tokens=P, response_lengths=())
    with pytest.raises(ValueError, match="at least 1 prompt token"):
        GroupShape(prompt_id="p", num_prompt_tokens=1, response_lengths=(3, -1))


def test_equal_prompt_ids_are_different_groups():
    shapes = [GroupShape(prompt_id="same", num_prompt_tokens=4, response_lengths=(3, 3))] * 2
    plan = plan_shapes(shapes)
    assert plan.assignment == ((((0, (0, 1)), (1, (0, 1))),),)
    assert plan.num_rows == 20


def test_the_plan_is_a_function_of_its_arguments():
    """Equal in another process with another hash seed, so that every rank may plan for itself."""
    code = (
        "from ratoon.planner import GroupShape, plan_shapes\n"
        "shapes = [GroupShape(prompt_id=i, num_prompt_tokens=i % 5 + 1, response_lengths=(i * i % 9, 4, i % 3))"
        " for i in range(60)]\n"
        "print(plan_shapes(shapes, num_ranks=7, max_rows_per_microbatch=23))"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert len(plans) == 1


def test_planning_imports_no_torch():
    code = "import sys, ratoon.planner.plan, ratoon.planner.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def heavy_tailed(num_groups: int, group_size: int) -> list[GroupShape]:
    """Log-normal lengths, the longest about 20 times the median."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(np.log(500), 1.0, num_groups).clip(1, 8_000).astype(int).tolist()
    responses = rng.lognormal(np.log(800), 0.9, (num_groups, group_size)).clip(0, 16_000).astype(int).tolist()
    return shapes_of(list(zip(prompts, responses, strict=True)))


@pytest.mark.parametrize("num_ranks", [1, 8, 1024])
def test_ten_thousand_heavy_tailed_groups(num_ranks: int):
    """Within 2 % of the lower bound, planned in less than 2 s on one core."""
    shapes = heavy_tailed(10_000, 8)
    start = time.process_time()
    plan = plan_shapes(shapes, num_ranks=num_ranks)
    planning_s = time.process_time() - start
    assert plan.imbalance <= 1.02
    assert planning_s < 2.0


def test_a_huge_oversized_group_is_cut_fast():
    """Responses that pair badly (two never fit together) stay near-linear."""
    start = time.process_time()
    plan = plan_shapes(shapes_of([(10, [600] * 10_000)]), max_rows_per_microbatch=1010)
    assert plan.num_microbatches == 10_000
    assert time.process_time() - start < 3.0


def test_config_is_in_rows_and_positive():
    assert PlannerConfig().max_rows_per_microbatch == 32_768
    with pytest.raises(ValidationError, match="max_rows_per_microbatch"):
        PlannerConfig(max_rows_per_microbatch=0)
    with pytest.raises(ValidationError, match="max_rows"):
        PlannerConfig.model_validate({"max_rows": 3})
    assert all(field.description for field in PlannerConfig.model_fields.values())
