"""How responses are drawn."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution that responses are drawn from, and where they end."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token (evaluation only: such samples cannot be trained on)."""

    max_response_tokens: int = 256
    """A response is cut after this many tokens, EOS included."""

    stop: tuple[str, ...] = ()
    """Strings that end a response as soon as its text holds one."""

    seed: int = 0
    """Run seed. With step, prompt id and response index it fixes every draw of a response."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"rollout.temperature must be finite and not negative, got {self.temperature}")
        if self.max_response_tokens < 1:
            raise ValueError(f"rollout.max_response_tokens must be at least 1, got {self.max_response_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("rollout.stop holds an empty string, which would end every response at once; remove it")
