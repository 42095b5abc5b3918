"""Loss, gradient and weights of a step do not depend on sharing, on cutting, or on the number of ranks (float64)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.distributed.test_data_parallel import run_on_two_ranks
from tests.parity.families import kept_in_float64
from tests.parity.step_oracle import (
    Outcome,
    algorithm_cases,
    assert_same_outcome,
    make_group,
    make_trainer,
    ragged_groups,
    run_by_hand,
    run_trainer,
)

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import DataParallel
from ratoon.loop.stages import plan_updates
from ratoon.planner import CostModel, StepPlan
from ratoon.trainer import Update
from ratoon.types import RolloutGroup

torch.set_num_threads(1)

LossMean = Literal["sequence", "token"]
LOSS_MEANS: tuple[LossMean, ...] = ("sequence", "token")
NUM_MICROBATCHES = (1, 2, 3, 5)
UNLIMITED = 10_000


def algorithm_of(loss_mean: LossMean, num_minibatches: int = 1, entropy_coefficient: float = 0.05) -> AlgorithmConfig:
    # A narrow range, so that ratios leave it after the first update.
    return AlgorithmConfig(
        loss_mean=loss_mean,
        num_minibatches=num_minibatches,
        entropy_coefficient=entropy_coefficient,
        clip_low=0.03,
        clip_high=0.05,
    )


def plan(
    groups: Sequence[RolloutGroup], num_updates: int, *, share: bool, max_rows: int = UNLIMITED, num_ranks: int = 1
) -> tuple[Update, ...]:
    return plan_updates(
        groups,
        num_updates=num_updates,
        num_ranks=num_ranks,
        max_rows_per_microbatch=max_rows,
        cost=CostModel(),
        share_prompts=share,
    )


@cache
def expected(loss_mean: LossMean, num_minibatches: int, entropy_coefficient: float = 0.05) -> Outcome:
    groups = ragged_groups()
    return run_by_hand(
        [groups[first::num_minibatches] for first in range(num_minibatches)],
        algorithm_of(loss_mean, num_minibatches, entropy_coefficient),
    )


def with_cut(update: Update, bins: Sequence[int], num_bins: int, num_ranks: int = 1) -> Update:
    """The update with its i-th response in microbatch `bins[i]`; microbatch b goes to rank b mod `num_ranks`."""
    assert num_bins % num_ranks == 0
    numbered = iter(bins)
    microbatches: list[dict[int, list[int]]] = [{} for _ in range(num_bins)]
    for group_index, group in enumerate(update.groups):
        for response_index in range(group.group_size):
            microbatches[next(numbered)].setdefault(group_index, []).append(response_index)
    parts = [tuple((group, tuple(chosen)) for group, chosen in one.items()) for one in microbatches]
    return assigned(update, tuple(tuple(parts[rank::num_ranks]) for rank in range(num_ranks)))


def assigned(update: Update, assignment: Any) -> Update:
    changed: StepPlan = replace(update.plan, assignment=assignment, kept_runs=((),) * len(assignment))
    return replace(update, plan=changed)


def num_responses(update: Update) -> int:
    return sum(group.group_size for group in update.groups)


def partitions(num_items: int, num_bins: int) -> Iterator[tuple[int, ...]]:
    """Every way of dealing items to exactly `num_bins` unlabelled bins."""

    def grow(prefix: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        if len(prefix) == num_items:
            if used == num_bins:
                yield prefix
            return
        for chosen in range(min(used + 1, num_bins)):
            yield from grow((*prefix, chosen), max(used, chosen + 1))

    return grow((), 0)


@pytest.mark.parametrize("loss_mean", LOSS_MEANS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("share", [True, False])
def test_step_agrees_with_the_papers_formula_at_every_row_budget(
    loss_mean: LossMean, num_minibatches: int, share: bool
):
    """Sharing prompts or not, and as many microbatches as a budget of rows makes. TRL#4170: the loss was another one
    without padding. verl#6401, verl#6689: with shared prompts the old log-probs were."""
    algorithm = algorithm_of(loss_mean, num_minibatches)
    counts: set[int] = set()
    for max_rows in (13, 20, 31, UNLIMITED):
        updates = plan(ragged_groups(), num_minibatches, share=share, max_rows=max_rows)
        found, result = run_trainer(updates, algorithm)
        assert_same_outcome(found, expected(loss_mean, num_minibatches), f"{max_rows} rows")
        counts.add(result.num_microbatches)
    assert len(counts) >= 3, "the budgets must cut the step differently"


@pytest.mark.parametrize("loss_mean", LOSS_MEANS)
def test_clipping_and_moving_weights_are_exercised(loss_mean: LossMean):
    """Else the comparisons above would not see the old log-probs, the clip range or the norm's limit."""
    outcome = expected(loss_mean, 2)
    assert 0.1 < outcome.clipped_fraction < 0.9
    assert outcome.kl_old_mean > 1e-3
    assert outcome.grad_norm > 0.5
    assert expected(loss_mean, 1).clipped_fraction == 0
    difference = expected(loss_mean, 1).loss - expected(loss_mean, 1, 0.0).loss
    assert abs(difference) > 0.01, "the entropy's share"


@pytest.mark.parametrize("loss_mean", LOSS_MEANS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("num_bins", NUM_MICROBATCHES)
def test_step_in_exactly_so_many_microbatches(loss_mean: LossMean, num_minibatches: int, share: bool, num_bins: int):
    """Responses dealt at random, siblings apart, some microbatches empty or with nothing but empty responses."""
    rng = np.random.default_rng(num_bins)
    algorithm = algorithm_of(loss_mean, num_minibatches)
    updates = [
        with_cut(update, rng.integers(0, num_bins, num_responses(update)).tolist(), num_bins)
        for update in plan(ragged_groups(), num_minibatches, share=share)
    ]
    found, result = run_trainer(updates, algorithm)
    assert result.num_microbatches == num_bins * num_minibatches
    assert_same_outcome(found, expected(loss_mean, num_minibatches))


def five_responses() -> tuple[RolloutGroup, ...]:
    rng = np.random.default_rng(7)
    shared = [4, 9, 3, 30]
    return (make_group(rng, shared, [4, 0]), make_group(rng, shared, [3]), make_group(rng, [8], [1, 5]))


@pytest.mark.parametrize(
    ("loss_mean", "share"),
    [
        ("sequence", True),
        pytest.param("sequence", False, marks=pytest.mark.full),
        pytest.param("token", True, marks=pytest.mark.full),
        ("token", False),
    ],
)
def test_every_way_of_cutting_five_responses(loss_mean: LossMean, share: bool):
    """verl#6957: the mean must be over the step, not over the microbatch. verl#6268: nor may a label be wrong at the
    edge of a piece."""
    algorithm = algorithm_of(loss_mean)
    by_hand = run_by_hand([five_responses()], algorithm)
    (update,) = plan(five_responses(), 1, share=share)
    num_cuts = 0
    for num_bins in NUM_MICROBATCHES:
        for bins in partitions(5, num_bins):
            found, _ = run_trainer([with_cut(update, bins, num_bins)], algorithm)
            assert_same_outcome(found, by_hand, bins)
            num_cuts += 1
    assert num_cuts == 1 + 15 + 25 + 1


def in_runs(update: Update, cuts: dict[int, list[list[int]]]) -> Update:
    """cuts: the responses of each microbatch, by group. Those of one group are a kept run."""
    microbatches = tuple(((group, tuple(chosen)),) for group, parts in cuts.items() for chosen in parts)
    starts = np.cumsum([0, *(len(parts) for parts in cuts.values())]).tolist()
    runs = tuple((start, stop) for start, stop in itertools.pairwise(starts) if stop - start > 1)
    return replace(update, plan=replace(update.plan, assignment=(microbatches,), kept_runs=(runs,)))


@pytest.mark.parametrize("loss_mean", LOSS_MEANS)
def test_a_prompt_kept_for_its_groups_microbatches(loss_mean: LossMean):
    """Forward once, backward once, between microbatches of other groups; one of them has nothing to score."""
    algorithm = algorithm_of(loss_mean)
    (update,) = plan(ragged_groups(), 1, share=True)
    cuts = {0: [[0], [1], [2]], 2: [[0]], 1: [[1], [0]], 4: [[0]], 3: [[0, 1]]}
    found, result = run_trainer([in_runs(update, cuts)], algorithm)
    assert_same_outcome(found, expected(loss_mean, 1))
    _, whole = run_trainer([update], algorithm)
    # The group that has nothing to score is not run by itself.
    assert result.num_rows == whole.num_rows - update.groups[4].prompt.num_tokens
    assert result.useful_flops < whole.useful_flops < 1.2 * result.useful_flops


@pytest.mark.parametrize("loss_mean", LOSS_MEANS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_kept_prompts_as_they_are_planned(loss_mean: LossMean, num_minibatches: int):
    """At a row budget that no group fits; old log-probs go on from kept prompts too."""
    algorithm = algorithm_of(loss_mean, num_minibatches)
    updates = plan_updates(
        ragged_groups(),
        num_updates=num_minibatches,
        num_ranks=1,
        max_rows_per_microbatch=13,
        cost=replace(CostModel(), seconds_per_microbatch=0.0),
        keeps_prompts=True,
    )
    assert any(any(update.plan.kept_runs) for update in updates)
    found, result = run_trainer(updates, algorithm)
    assert_same_outcome(found, expected(loss_mean, num_minibatches))
    assert result.num_rows <= sum(update.plan.num_rows for update in updates)


def idle_second_rank(update: Update) -> Update:
    """Rank 0 does everything, in as many microbatches as the plan of one rank has."""
    (only,) = update.plan.assignment
    return assigned(update, (only, tuple(() for _ in only)))


def uneven_ranks(update: Update) -> Update:
    """One response on rank 1, one empty microbatch there, and the rest on rank 0."""
    bins = [1, *(2 * (index % 2) for index in range(1, num_responses(update)))]
    return with_cut(update, bins, 4, num_ranks=2)


def step_updates(case: tuple[str, bool, int]) -> list[Update]:
    kind, share, num_minibatches = case
    if kind == "planned":
        return list(plan(ragged_groups(), num_minibatches, share=share, max_rows=20, num_ranks=2))
    change = idle_second_rank if kind == "idle" else uneven_ranks
    return [change(update) for update in plan(ragged_groups(), num_minibatches, share=share, max_rows=20)]


CASES = [(kind, share, 2) for kind in ("idle", "uneven", "planned") for share in (True, False)] + [("idle", True, 1)]


def steps_of_every_case(data_parallel: DataParallel) -> list[dict[str, Any]]:
    # The harness's tiny buckets are for its own tests.
    data_parallel = replace(data_parallel, bucket_bytes=1 << 16)
    found: list[dict[str, Any]] = []
    for loss_mean in LOSS_MEANS:
        for case in CASES:
            outcome, result = run_trainer(step_updates(case), algorithm_of(loss_mean, case[2]), data_parallel)
            found.append({"outcome": asdict(outcome), "result": asdict(result)})
    return found


ALGORITHMS = ("dr-grpo", "gspo with k3 and icepop", "cispo with k2 and sequence-tis")
"""Every denominator, and everything that looks at whole responses."""


def steps_of_algorithms(data_parallel: DataParallel) -> list[dict[str, Any]]:
    data_parallel = replace(data_parallel, bucket_bytes=1 << 16)
    found: list[dict[str, Any]] = []
    for case in ALGORITHMS:
        outcome, result = run_trainer(step_updates(("uneven", True, 2)), algorithm_cases()[case], data_parallel)
        found.append({"outcome": asdict(outcome), "result": asdict(result)})
    return found


def kl_of_responses(data_parallel: DataParallel) -> list[list[float]]:
    """To the reference, where each rank scores other responses, and where one scores none."""
    found: list[list[float]] = []
    for kind in ("uneven", "idle"):
        (update,) = step_updates((kind, True, 1))
        trainer = make_trainer(AlgorithmConfig(name="rloo", kl_coefficient=0.1), data_parallel)
        with kept_in_float64():
            found.append(np.concatenate(trainer.kl_to_reference(update)).tolist())
    return found


@pytest.fixture(scope="module")
def every_check(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """[rank][check]."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_on_two_ranks([steps_of_every_case, steps_of_algorithms, kl_of_responses], folder)


@pytest.fixture(scope="module")
def by_rank(every_check: list[list[Any]]) -> list[list[dict[str, Any]]]:
    return [checks[0] for checks in every_check]


def test_two_ranks_agree_with_the_papers_formula(by_rank: list[list[dict[str, Any]]]):
    """verl#5591: also where one of them has nothing to do, and where their shares are uneven."""
    wanted = [(loss_mean, case) for loss_mean in LOSS_MEANS for case in CASES]
    for rank in by_rank:
        for (loss_mean, case), found in zip(wanted, rank, strict=True):
            assert_same_outcome(Outcome(**found["outcome"]), expected(loss_mean, case[2]), (loss_mean, case))


def test_ranks_report_and_hold_the_same_bits(by_rank: list[list[dict[str, Any]]]):
    first, second = by_rank
    for mine, theirs in zip(first, second, strict=True):
        for report in (mine["result"], theirs["result"]):
            assert report.pop("update_s") > 0
        assert mine["result"] == theirs["result"]
        for name, weight in mine["outcome"]["weights"].items():
            assert torch.equal(weight, theirs["outcome"]["weights"][name])


def test_two_ranks_report_what_one_rank_reports(by_rank: list[list[dict[str, Any]]]):
    """Sums over ranks, not the first rank's share."""
    for (loss_mean, case), found in zip([(m, c) for m in LOSS_MEANS for c in CASES], by_rank[0], strict=True):
        by_hand = expected(loss_mean, case[2])
        report = found["result"]
        assert report["num_loss_tokens"] == sum(sum(group.response_lengths) for group in ragged_groups())
        for name in ("entropy_mean", "ratio_mean", "kl_old_mean", "clipped_fraction", "mismatch_mean_abs"):
            assert report[name] == pytest.approx(getattr(by_hand, name), rel=1e-6, abs=1e-12), name
        assert report["mismatch_max_abs"] == pytest.approx(by_hand.mismatch_max_abs, rel=1e-6)


def test_two_ranks_agree_on_other_algorithms(every_check: list[list[Any]]):
    groups = ragged_groups()
    for place, case in enumerate(ALGORITHMS):
        by_hand = run_by_hand([groups[0::2], groups[1::2]], algorithm_cases()[case])
        for checks in every_check:
            found = checks[1][place]
            assert_same_outcome(Outcome(**found["outcome"]), by_hand, case)
            for name, value in by_hand.reported().items():
                assert value is None or found["result"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), (case, name)


def test_every_rank_knows_the_kl_of_every_response(every_check: list[list[Any]]):
    trainer = make_trainer(AlgorithmConfig(name="rloo", kl_coefficient=0.1))
    with kept_in_float64():
        alone = np.concatenate(trainer.kl_to_reference(plan(ragged_groups(), 1, share=True)[0]))
    assert np.count_nonzero(alone) == sum(length > 0 for group in ragged_groups() for length in group.response_lengths)
    assert every_check[0][2] == every_check[1][2]
    for found in every_check[0][2]:
        np.testing.assert_allclose(found, alone, rtol=1e-9)
