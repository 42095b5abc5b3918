"""Each scored token's share of the step's mean loss.

The weights carry the denominator of the whole step, over every rank and microbatch. So a loss is
summed, never averaged, on its way up, and neither value nor gradient depends on how the step was
cut. The weights of a mean over tokens or sequences add up to 1 over the step's loss tokens. These two
count what the mask keeps: a token that is masked in the numerator is not counted below.
"""

# Shape letters: M scored tokens of one microbatch, N sequences.

import torch
from torch import Tensor


def token_mean_weights(loss_mask_M: Tensor, *, num_loss_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / num_loss_tokens for each loss token: long responses weigh more.

    DAPO, arXiv 2503.14476, §3.3 (token-level policy gradient loss).

    loss_mask_M: [M] bool, the tokens trained on.
    num_loss_tokens: tokens that the mask keeps in the whole step, over every rank and microbatch.

    Returns [M] `dtype`. A step without loss tokens weighs nothing: all zeros.
    """
    assert loss_mask_M.dtype == torch.bool, f"loss_mask_M must be bool, got {loss_mask_M.dtype}"
    assert num_loss_tokens >= 0, f"num_loss_tokens counts tokens, got {num_loss_tokens}"
    return loss_mask_M.to(dtype) / max(num_loss_tokens, 1)


def constant_weights(
    loss_mask_M: Tensor, *, max_response_tokens: int, num_sequences: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """1 / (max_response_tokens · num_sequences) for each loss token, whatever the lengths.

    Dr.GRPO, arXiv 2503.20783, §3.2 and its listing: a sum over tokens, divided by a constant, so that a long wrong
    response is not punished less per token than a short one. The weights of a step add up to the responses'
    mean length over the longest length allowed.

    loss_mask_M: [M] bool, the tokens trained on.
    max_response_tokens: the run's limit, the same for every step.
    num_sequences: sequences of the whole step that are averaged over, over every rank and microbatch.

    Returns [M] `dtype`.
    """
    assert loss_mask_M.dtype == torch.bool, f"loss_mask_M must be bool, got {loss_mask_M.dtype}"
    assert max_response_tokens >= 1, f"max_response_tokens must be positive, got {max_response_tokens}"
    assert num_sequences >= 0, f"num_sequences counts sequences, got {num_sequences}"
    return loss_mask_M.to(dtype) / (max_response_tokens * max(num_sequences, 1))


def sequence_mean_weights(
    loss_mask_M: Tensor,
    sequence_of_M: Tensor,
    num_loss_tokens_of_sequence_N: Tensor,
    *,
    num_sequences: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """1 / (loss tokens of its sequence · num_sequences) for each loss token: every sequence weighs the same.

    GRPO, arXiv 2402.03300, §4.1.1, eq. 3: 1/G Σ 1/|o| Σ, with G over all groups of the step.

    loss_mask_M: [M] bool, the tokens trained on.
    sequence_of_M: [M] integers, which entry of `num_loss_tokens_of_sequence_N` a token belongs to.
    num_loss_tokens_of_sequence_N: [N] integers, tokens the mask keeps in each whole sequence, also
        where its other tokens are scored elsewhere.
    num_sequences: sequences of the whole step that are averaged over, over every rank and
        microbatch. Whether a sequence without loss tokens counts is the caller's choice; it
        adds nothing to the loss, and a sequence that was masked away is best not counted.

    Returns [M] `dtype`. Weights add up to 1 over the step when every counted sequence has a loss token.
    """
    assert loss_mask_M.dtype == torch.bool, f"loss_mask_M must be bool, got {loss_mask_M.dtype}"
    assert loss_mask_M.shape == sequence_of_M.shape, (
        f"{tuple(loss_mask_M.shape)} mask entries for {tuple(sequence_of_M.shape)} sequence numbers"
    )
    assert num_sequences >= 0, f"num_sequences counts sequences, got {num_sequences}"
    length_N = num_loss_tokens_of_sequence_N.clamp(min=1).to(dtype)
    weight_N = 1.0 / (length_N * max(num_sequences, 1))
    return loss_mask_M.to(dtype) * weight_N[sequence_of_M.long()]
