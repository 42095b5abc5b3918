"""Draws one token a row without a word from the host."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: B rows, V vocabulary.

import torch
from torch import Tensor

from ratoon.ops.sampling.kernels import draw_kernel, tile_sums_kernel

VOCABULARY_TILE = 2048
"""Tokens whose weights one program adds up."""


def draw_tokens(logits_BV: Tensor, temperature_B: Tensor, key_B: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [B] int64 and log-probs [B] float32, as `ratoon.rollout.draws.sample_tokens` gives them.

    logits_BV: any floating dtype, rows of any stride. temperature_B: [B] float64; 0 takes the likeliest token.
    key_B, position_B: [B] int64; the response's key (its bits) and how many tokens it has.
    """
    B, V = logits_BV.shape
    num_tiles = -(-V // VOCABULARY_TILE)
    highest = logits_BV.new_empty(B, num_tiles, dtype=torch.float32)
    sums = logits_BV.new_empty(B, num_tiles, dtype=torch.float64)
    likeliest = logits_BV.new_empty(B, num_tiles, dtype=torch.int32)
    token_B = logits_BV.new_empty(B, dtype=torch.int64)
    logprob_B = logits_BV.new_empty(B, dtype=torch.float32)
    if B == 0:
        return token_B, logprob_B
    tile_sums_kernel[(B, num_tiles)](
        logits_BV, temperature_B, highest, sums, likeliest, logits_BV.stride(0), V, num_tiles,
        TILE=VOCABULARY_TILE, num_warps=8,
    )  # fmt: skip
    draw_kernel[(B,)](
        logits_BV, temperature_B, key_B, position_B, highest, sums, likeliest, token_B, logprob_B,
        logits_BV.stride(0), V, num_tiles,
        TILE=VOCABULARY_TILE, BLOCK_N=1 << max(num_tiles - 1, 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return token_B, logprob_B
