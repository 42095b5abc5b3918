"""Sums and means over each sequence's loss tokens."""

# Shape letters: M scored tokens of one microbatch, N sequences.

import torch
from torch import Tensor


def sequence_sums(values_M: Tensor, is_loss_M: Tensor, sequence_of_M: Tensor, *, num_sequences: int) -> Tensor:
    """[N] float64: the sum of each sequence's values where `is_loss_M`; 0 for a sequence without any.

    values_M: [M], differentiable. sequence_of_M: [M] integers below `num_sequences`, in any order.
    """
    assert values_M.shape == is_loss_M.shape == sequence_of_M.shape, (
        f"{tuple(values_M.shape)} values, {tuple(is_loss_M.shape)} mask entries and {tuple(sequence_of_M.shape)} "
        "sequence numbers"
    )
    # In float64, for a GPU adds in an order of its own, which float32 would show in the result.
    kept_M = torch.where(is_loss_M, values_M.double(), 0.0)
    return kept_M.new_zeros(num_sequences).index_add(0, sequence_of_M.long(), kept_M)


def sequence_means(values_M: Tensor, is_loss_M: Tensor, sequence_of_M: Tensor, *, num_sequences: int) -> Tensor:
    """[M] float64: at each token, the mean over its sequence's loss tokens; 0 where the sequence has none."""
    sum_N = sequence_sums(values_M, is_loss_M, sequence_of_M, num_sequences=num_sequences)
    count_N = sequence_sums(is_loss_M.double(), is_loss_M, sequence_of_M, num_sequences=num_sequences)
    return (sum_N / count_N.clamp(min=1.0))[sequence_of_M.long()]
