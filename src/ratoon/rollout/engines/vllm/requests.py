"""What vLLM's core hands out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """What one step drew for one request."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    """vLLM's, once the request is over."""

    num_reused: int
    """Tokens of its prompt that were in the cache."""
