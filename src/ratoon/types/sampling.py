"""How responses are drawn."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution that responses are drawn from, and where they end.

    The order of what leaves tokens out is that of transformers: the temperature divides the logits, then `top_k` keeps
    the likeliest tokens, `top_p` the likeliest of these by their renormalised probabilities, and `min_p` those of them
    that are likely enough beside the likeliest. Equally likely tokens rank by token id, the lowest first, so each
    leaves a well defined set, the likeliest token always in it.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token (evaluation only: such samples cannot be trained on)."""

    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities add up to at least this; 1 keeps all."""

    top_k: int = 0
    """Draw among this many likeliest tokens; 0 keeps all."""

    min_p: float = 0.0
    """Draw among tokens at least this many times as likely as the likeliest; 0 keeps all."""

    max_response_tokens: int = 256
    """A response is cut after this many tokens, EOS included."""

    stop: tuple[str, ...] = ()
    """Strings that end a response as soon as its text holds one."""

    seed: int = 0
    """Run seed. With step, prompt id and response index it fixes every draw of a response."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"rollout.temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"rollout.top_k must not be negative, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"rollout.min_p must lie in [0, 1], got {self.min_p}")
        if self.max_response_tokens < 1:
            raise ValueError(f"rollout.max_response_tokens must be at least 1, got {self.max_response_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("rollout.stop holds an empty string, which would end every response at once; remove it")

    @property
    def is_truncated(self) -> bool:
        """Some tokens are never drawn: log-probs are those of the tokens that are kept, renormalised."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
