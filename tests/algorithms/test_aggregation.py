"""Loss weights: denominators are those of the whole step, and count what the mask keeps."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import constant_weights, sequence_mean_weights, token_mean_weights

masks = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=9)  # one list a sequence


def flatten(sequences: list[list[bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mask [M], sequence_of [M], num_loss_tokens_of_sequence [N]."""
    mask_M = torch.tensor([keep for sequence in sequences for keep in sequence], dtype=torch.bool)
    sequence_of_M = torch.tensor([n for n, sequence in enumerate(sequences) for _ in sequence], dtype=torch.int32)
    return mask_M, sequence_of_M, torch.tensor([sum(sequence) for sequence in sequences])


@given(masks)
def test_token_mean_is_one_over_the_tokens_kept(sequences: list[list[bool]]):
    mask_M, _, count_N = flatten(sequences)
    total = int(count_N.sum())
    weights_M = token_mean_weights(mask_M, num_loss_tokens=total, dtype=torch.float64)
    assert weights_M.tolist() == [float(Fraction(1, total)) if keep else 0.0 for keep in mask_M.tolist()]


@given(masks)
def test_sequence_mean_weighs_every_sequence_alike(sequences: list[list[bool]]):
    mask_M, sequence_of_M, count_N = flatten(sequences)
    num_sequences = int((count_N > 0).sum())
    weights_M = sequence_mean_weights(mask_M, sequence_of_M, count_N, num_sequences=num_sequences, dtype=torch.float64)
    assert torch.isfinite(weights_M).all()
    for n, sequence in enumerate(sequences):
        share = float(weights_M[sequence_of_M == n].sum())
        assert share == pytest.approx(1 / num_sequences if any(sequence) else 0.0, rel=1e-12)


@given(masks, st.integers(0, 2**32), st.integers(1, 5))
def test_weights_do_not_depend_on_the_cut_into_microbatches(sequences: list[list[bool]], seed: int, num_cuts: int):
    """Covers verl#6957 (the effective learning rate depends on the micro-batch count)."""
    mask_M, sequence_of_M, count_N = flatten(sequences)
    num_loss_tokens, num_sequences = int(count_N.sum()), len(sequences)
    token_M = token_mean_weights(mask_M, num_loss_tokens=num_loss_tokens)
    sequence_M = sequence_mean_weights(mask_M, sequence_of_M, count_N, num_sequences=num_sequences)

    order = list(range(len(sequences)))
    random.Random(seed).shuffle(order)
    for cut in range(num_cuts):
        chosen = order[cut::num_cuts]
        part_mask, part_sequence_of, part_count = flatten([sequences[n] for n in chosen])
        rows = torch.cat([torch.zeros(0, dtype=torch.long), *(torch.where(sequence_of_M == n)[0] for n in chosen)])
        part_token = token_mean_weights(part_mask, num_loss_tokens=num_loss_tokens)
        part_sequence = sequence_mean_weights(part_mask, part_sequence_of, part_count, num_sequences=num_sequences)
        assert torch.equal(part_token, token_M[rows])
        assert torch.equal(part_sequence, sequence_M[rows])


def test_masked_tokens_leave_numerator_and_denominator_together():
    """Covers TRL#6439, TRL#6369 (truncated completions masked in the numerator, counted in the denominator)."""
    mask_M, sequence_of_M, count_N = flatten([[True, True], [False, False, False], [True]])
    losses_M = torch.full((6,), 4.0)
    token_M = token_mean_weights(mask_M, num_loss_tokens=int(count_N.sum()))
    sequence_M = sequence_mean_weights(mask_M, sequence_of_M, count_N, num_sequences=int((count_N > 0).sum()))
    assert float((losses_M * token_M).sum()) == pytest.approx(4.0)
    assert float((losses_M * sequence_M).sum()) == pytest.approx(4.0)


def test_sequence_counted_without_loss_tokens_adds_nothing():
    mask_M, sequence_of_M, count_N = flatten([[True, True], [], [False]])
    weights_M = sequence_mean_weights(mask_M, sequence_of_M, count_N, num_sequences=3, dtype=torch.float64)
    assert weights_M.tolist() == [1 / 6, 1 / 6, 0.0]


def test_a_step_without_loss_tokens_weighs_nothing():
    mask_M, sequence_of_M, count_N = flatten([[False], [False, False]])
    assert token_mean_weights(mask_M, num_loss_tokens=0).tolist() == [0.0] * 3
    assert sequence_mean_weights(mask_M, sequence_of_M, count_N, num_sequences=0).tolist() == [0.0] * 3


def test_a_microbatch_without_scored_tokens():
    none_M = torch.zeros(0, dtype=torch.bool)
    sequence_of_M = torch.zeros(0, dtype=torch.int32)
    assert token_mean_weights(none_M, num_loss_tokens=7).shape == (0,)
    for count_N in (torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
        assert sequence_mean_weights(none_M, sequence_of_M, count_N, num_sequences=3).shape == (0,)


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(AssertionError, match=r"must be bool, got torch\.float32"):
        token_mean_weights(torch.ones(3), num_loss_tokens=3)


@given(masks, st.integers(1, 40))
def test_the_constant_mean_divides_by_nothing_that_the_responses_choose(sequences: list[list[bool]], limit: int):
    mask_M, _, _ = flatten(sequences)
    num_sequences = len(sequences)
    weights_M = constant_weights(mask_M, max_response_tokens=limit, num_sequences=num_sequences, dtype=torch.float64)
    assert weights_M.tolist() == [
        float(Fraction(1, limit * num_sequences)) if keep else 0.0 for keep in mask_M.tolist()
    ]


def test_the_constant_mean_of_a_step_without_responses():
    none_M = torch.zeros(0, dtype=torch.bool)
    assert constant_weights(none_M, max_response_tokens=5, num_sequences=0).shape == (0,)
    with pytest.raises(AssertionError, match="max_response_tokens must be positive"):
        constant_weights(none_M, max_response_tokens=0, num_sequences=1)
