"""Rewards adjusted before responses are compared."""

# Shape letters: N responses.

import numpy as np
from numpy.typing import ArrayLike, NDArray


def soft_overlong_penalty(lengths_N: ArrayLike, *, max_response_tokens: int, buffer_tokens: int) -> NDArray[np.float64]:
    """0 for most lengths, falling in a straight line to -1 over the last `buffer_tokens` before the limit.

    DAPO, arXiv 2503.14476, §3.4, eq. 13 (soft overlong punishment), where the limit is L_max and the buffer L_cache.
    Add it to the reward: a response is told that it grows too long before it is cut.

    lengths_N: [N] response tokens, EOS included. Returns [N] float64 in [-1, 0].

    Raises ValueError where the buffer is not within 1 and `max_response_tokens`, or a length is negative.
    """
    if not 1 <= buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"the overlong buffer must be from 1 to max_response_tokens={max_response_tokens:,} tokens long, "
            f"got {buffer_tokens:,}; DAPO takes a fifth of the limit"
        )
    lengths = np.asarray(lengths_N, np.float64)
    if (lengths < 0).any():
        raise ValueError(f"lengths count tokens and cannot be negative, got {lengths.min():g}")
    free_tokens = max_response_tokens - buffer_tokens
    return np.clip((free_tokens - lengths) / buffer_tokens, -1.0, 0.0) + 0.0  # -0.0 becomes 0.0
