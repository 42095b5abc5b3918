"""A core that draws a fixed word for every request, and remembers what it was asked."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ratoon.rollout.engines.vllm.requests import NewTokens

WORD = (10, 11, 12, 13)


@dataclass
class FakeCore:
    max_model_len: int = 64
    requests: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    open: dict[str, int] = field(default_factory=dict[str, int])
    aborted: list[str] = field(default_factory=list[str])
    error: Exception | None = None
    num_steps: int = 0
    logprob: float = -0.5
    ends_early: bool = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.open)

    def add(self, request_id: str, token_ids: list[int], **settings: Any) -> None:
        self.requests[request_id] = {"token_ids": token_ids, **settings}
        self.open[request_id] = 0

    def step(self) -> list[NewTokens]:
        self.num_steps += 1
        if self.error is not None:
            raise self.error
        news = []
        for request_id, count in list(self.open.items()):
            asked = self.requests[request_id]
            token = WORD[count % len(WORD)]
            is_over = self.ends_early or count + 1 == asked["max_tokens"] or token in asked["eos_ids"]
            news.append(
                NewTokens(
                    request_id=request_id,
                    token_ids=[token],
                    logprobs=[self.logprob],
                    finish_reason="length" if is_over else None,
                    num_reused=len(asked["token_ids"]) - 1,
                )
            )
            self.open[request_id] += 1
            if is_over:
                del self.open[request_id]
        return news

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.open.pop(request_id, None)

    def forget_cache(self) -> None:
        pass
