"""Seeded draws: every token's chance is a function of the response and the position, and of nothing else.

A response has a 64-bit key, a BLAKE2b digest of (run seed, step, prompt id, index in the group). The uniform number at
position i is the i-th output of a SplitMix64 stream that starts at the key (Steele, Lea and Flood, OOPSLA 2014), so it
is random access: no state is carried, no global generator is read or moved. The token is the inverse of the cumulative
distribution at that number: one uniform a token, whatever the vocabulary.
"""

# Shape letters: B responses of one forward pass, V vocabulary.

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIFORM_BITS = 48
"""Few enough that the largest number, times any total, rounds below that total in float64."""


def response_key(seed: int, step: int, prompt_id: str | int, index: int) -> int:
    """The 64-bit key of one response; the prompt ids 1 and "1" differ."""
    name = prompt_id if isinstance(prompt_id, str) else int(prompt_id)
    words = repr((int(seed), int(step), name, int(index))).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def request_seed(key: int, num_tokens: int) -> int:
    """63 bits for an engine that draws by seeds of its own: another one for each place that a response goes on from."""
    words = f"{key},{num_tokens}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def uniform_draws(keys_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """[B] float64 in (0, 1): the draw of the response with key b at token position b, counted from 0."""
    bits = keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * _GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits = bits ^ (bits >> np.uint64(31))
    return ((bits >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS


def sample_tokens(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row, with its log-probability.

    logits_BV: [B, V] float32. temperature_B: [B] float64; 0 takes the likeliest token (ties to the lowest id).
    uniform_B: [B] float64 in (0, 1).

    Returns token ids [B] int64 and log-probs [B] float32: log-softmax of logits / temperature over the whole
    vocabulary; 0 for a greedy row, whose token was certain; not finite where the row's logits are not. All sums are
    float64: a float32 sum over a large vocabulary biases log-probs by 1e-6, and a token without probability would have
    a chance of being drawn.
    """
    is_greedy_B = temperature_B == 0
    scale_B = torch.where(is_greedy_B, torch.ones_like(temperature_B), temperature_B)
    scaled_BV = logits_BV.double().div_(scale_B[:, None])
    scaled_BV -= scaled_BV.amax(dim=-1, keepdim=True)
    cumulative_BV = scaled_BV.exp().cumsum_(dim=-1)
    total_B1 = cumulative_BV[:, -1:]
    drawn_B1 = torch.searchsorted(cumulative_BV, uniform_B[:, None] * total_B1, right=True)
    # Logits that are not finite leave a threshold that no sum exceeds.
    drawn_B1.clamp_(max=logits_BV.shape[1] - 1)
    token_B1 = torch.where(is_greedy_B[:, None], logits_BV.argmax(dim=-1, keepdim=True), drawn_B1)
    logprob_B = (scaled_BV.gather(1, token_B1) - total_B1.log())[:, 0]
    return token_B1[:, 0], torch.where(is_greedy_B, logprob_B * 0, logprob_B).float()
