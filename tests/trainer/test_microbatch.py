"""Vectors over scored tokens against a walk over the responses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.planner import plan_step
from ratoon.trainer import Update
from ratoon.trainer.microbatch import LossMean, Microbatch, build_microbatch
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup

torch.set_num_threads(1)

MAX_RESPONSE_TOKENS = 9
lengths_of_groups = st.lists(st.lists(st.integers(0, 6), min_size=0, max_size=4), min_size=1, max_size=4)


def make_update(lengths: list[list[int]], max_rows: int = 1_000, num_ranks: int = 1) -> Update:
    """Every token id, advantage and log-prob of the update is another number."""
    counter = iter(range(10_000))
    groups = []
    for index, response_lengths in enumerate(lengths):
        prompt = Prompt(index, np.array([next(counter) for _ in range(index + 1)]))
        responses = []
        for length in response_lengths:
            ids = np.array([next(counter) for _ in range(length)], np.int64)
            responses.append(Response(ids, rollout_logprobs=-ids.astype(np.float32)))
        advantages = np.array([next(counter) / 7 for _ in response_lengths])
        groups.append(RolloutGroup(prompt, tuple(responses), advantages_N=advantages))
    return Update(groups=tuple(groups), plan=plan_step(groups, num_ranks=num_ranks, max_rows_per_microbatch=max_rows))


def all_microbatches(update: Update, loss_mean: LossMean) -> list[tuple[Microbatch, list[tuple[int, int]]]]:
    """Of every rank, each with the (group, response) pairs in it."""
    return [
        (
            build_microbatch(update, parts, loss_mean=loss_mean, max_response_tokens=MAX_RESPONSE_TOKENS),
            [(group, response) for group, chosen in parts for response in chosen],
        )
        for rank in update.plan.assignment
        for parts in rank
    ]


@settings(deadline=None, max_examples=60)
@given(
    lengths_of_groups,
    st.integers(10, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["sequence", "token", "constant"]),
)
def test_vectors_stand_at_their_tokens(lengths: list[list[int]], max_rows: int, num_ranks: int, loss_mean: LossMean):
    """verl#6310: a response without tokens must not shift its siblings' rewards."""
    update = make_update(lengths, max_rows, num_ranks)
    num_responses = sum(len(group) for group in lengths)
    num_tokens = sum(sum(group) for group in lengths)
    seen = 0
    for batch, pairs in all_microbatches(update, loss_mean):
        expected: list[tuple[int, float, float, float]] = []
        for group_index, response_index in pairs:
            group = update.groups[group_index]
            assert group.advantages_N is not None
            tokens = group.responses[response_index].token_ids.tolist()
            for token in tokens:
                weight = {
                    "token": 1 / num_tokens,
                    "sequence": 1 / (len(tokens) * num_responses),
                    "constant": 1 / (MAX_RESPONSE_TOKENS * num_responses),
                }[loss_mean]
                expected.append((token, group.advantages_N[response_index], -token, weight))
        assert batch.advantages_M is not None and batch.rollout_logprobs_M is not None
        found = zip(
            batch.layout.target_M.tolist(),
            batch.advantages_M.tolist(),
            batch.rollout_logprobs_M.tolist(),
            batch.loss_weights_M.tolist(),
            strict=True,
        )
        for ours, wanted in zip(found, expected, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-12)
        seen += len(expected)
    assert seen == num_tokens


@settings(deadline=None, max_examples=60)
@given(lengths_of_groups, st.integers(10, 40), st.sampled_from([1, 2, 3]))
def test_weights_of_the_step_add_up_however_it_is_cut(lengths: list[list[int]], max_rows: int, num_ranks: int):
    """verl#6957: the number of microbatches must not scale the learning rate.

    TRL#6439: the tokens in the denominator are those in the numerator.
    """
    update = make_update(lengths, max_rows, num_ranks)
    flat = [length for group in lengths for length in group]
    sums = {
        loss_mean: sum(float(batch.loss_weights_M.sum()) for batch, _ in all_microbatches(update, loss_mean))
        for loss_mean in ("sequence", "token", "constant")
    }
    num_weighted = sum(int((batch.loss_weights_M != 0).sum()) for batch, _ in all_microbatches(update, "token"))
    assert num_weighted == update.plan.num_loss_tokens == sum(flat)
    assert sums["token"] == pytest.approx(1.0 if any(flat) else 0.0)
    # A response without tokens is one of the responses averaged over, and adds 0.
    assert sums["constant"] == pytest.approx(sum(flat) / (MAX_RESPONSE_TOKENS * len(flat)) if flat else 0.0)
    assert sums["sequence"] == pytest.approx(np.count_nonzero(flat) / len(flat) if flat else 0.0)


def test_truncated_responses_count_above_and_below():
    """TRL#6439: masked in the numerator but counted in the denominator."""
    update = make_update([[4, 2]])
    group = update.groups[0]
    cut = replace(group.responses[0], finish_reason=FinishReason.LENGTH)
    truncated = replace(update, groups=(replace(group, responses=(cut, group.responses[1])),))
    (batch, _), *_ = all_microbatches(truncated, "token")
    assert batch.loss_weights_M.tolist() == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("loss_mean", ["sequence", "token", "constant"])
def test_a_microbatch_of_nothing_has_empty_vectors(loss_mean: LossMean):
    batch = build_microbatch(make_update([[3]]), (), loss_mean=loss_mean, max_response_tokens=5)
    assert batch.layout.num_rows == batch.layout.num_scored == 0
    assert batch.loss_weights_M.shape == (0,)


@pytest.mark.parametrize("loss_mean", ["sequence", "token", "constant"])
def test_an_update_of_nothing_but_empty_responses_has_no_denominator_of_zero(loss_mean: LossMean):
    """TRL#5826, TRL#5662: an empty mask became NaN."""
    (batch, _), *_ = all_microbatches(make_update([[0, 0], [0]]), loss_mean)
    assert batch.layout.num_scored == batch.loss_weights_M.numel() == 0
    assert batch.layout.num_sequences == 3


def test_what_the_groups_lack_is_absent():
    update = make_update([[2, 0], [3]])
    first, second = update.groups
    silent = replace(first.responses[1], rollout_logprobs=None)
    partly = replace(update, groups=(replace(first, responses=(first.responses[0], silent)), second))
    (batch, _), *_ = all_microbatches(partly, "token")
    assert batch.rollout_logprobs_M is not None, "a response without tokens has nothing to report"
    silent = replace(first.responses[0], rollout_logprobs=None)
    bare = replace(first, responses=(silent, first.responses[1]), advantages_N=None)
    (batch, _), *_ = all_microbatches(replace(update, groups=(bare, second)), "token")
    assert batch.rollout_logprobs_M is None and batch.advantages_M is None
    assert batch.old_logprobs_M is None


def test_the_constant_mean_needs_the_limit():
    update = make_update([[3]])
    with pytest.raises(AssertionError, match=r"divides by rollout\.max_response_tokens"):
        build_microbatch(update, update.plan.assignment[0][0], loss_mean="constant")
