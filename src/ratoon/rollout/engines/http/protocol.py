"""What the engine asks of a server, whichever it is."""

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from ratoon.rollout.errors import RolloutError


class ServerLostError(RolloutError):
    """The server is gone, or does not answer any more; the message says what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """One response, or the rest of one, to be drawn."""

    token_ids: list[int]
    """The prompt, then the response's tokens so far."""

    max_tokens: int
    """To draw at most, 1 or more."""

    temperature: float
    """0 takes the likeliest token."""

    stop_token_ids: list[int]
    """Each ends the response, and is its last token."""

    seed: int
    """In [0, 2**63). Two requests that agree in it and in `token_ids` draw alike."""

    request_id: str


class ChunkEnd(StrEnum):
    """What the server says of the end of a response."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of a response."""

    token_ids: list[int]

    logprobs: list[float]
    """One for each token, under the sampling temperature."""

    end: ChunkEnd | None
    """Set in a response's last chunk."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    version: str

    model_names: tuple[str, ...]

    max_tokens: int | None
    """Prompt and response together; None where it does not say."""


class ServerProtocol(Protocol):
    """One kind of server. Everything waits at most as long as its timeouts say.

    Raises `ServerLostError` where the server cannot be reached, `RolloutError` where it answers with an error or with
    what is not an answer.
    """

    name: str
    """For messages."""

    async def is_healthy(self) -> bool:
        """Whether the server serves; false where it cannot be reached."""
        ...

    async def facts(self) -> ServerFacts: ...

    async def check_serves_updates(self) -> None:
        """Raises UserError where the server was started without what pausing and new weights need."""
        ...

    def generate(self, request: ResponseRequest) -> AsyncGenerator[TokenChunk, None]:
        """The response as it grows. Closing the iterator ends it on the server as well."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """The log-prob of each token but the first after those before it, at temperature 1."""
        ...

    async def pause(self) -> None:
        """End every response on the server, and begin none before `resume`. Waits for the forward pass."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, folder: Path, version: int, timeout_s: float) -> None:
        """Serve the weights of a model folder, forget what was cached of others, and take `version` as their name.

        The server is paused.
        """
        ...


class Listing(Protocol):
    """How a server is started: what is put behind the user's command, and into its environment."""

    def arguments(self, *, model: Path, name: str, host: str, port: int) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...


def checked_chunk(token_ids: Any, logprobs: Any, end: ChunkEnd | None, *, what: str) -> TokenChunk:
    """A chunk of what a server sent. Raises RolloutError, naming `what` sent it, for anything else than that."""
    if not isinstance(token_ids, list) or not all(type(token) is int and token >= 0 for token in token_ids):
        raise RolloutError(f"{what} sent {shortened(token_ids)} where token ids belong")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        found = f"{len(logprobs)} log-probs" if isinstance(logprobs, list) else shortened(logprobs)
        raise RolloutError(f"{what} sent {len(token_ids)} tokens with {found}; each token needs one")
    for token, logprob in zip(token_ids, logprobs, strict=True):
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not is_number or not math.isfinite(logprob) or logprob > 1e-3:
            raise RolloutError(
                f"{what} gave token {token} the log-prob {shortened(logprob)}, which is none: the policy's logits on "
                "the server are not finite, or its weights are not those that were sent"
            )
    return TokenChunk(token_ids, [float(logprob) for logprob in logprobs], end)


def checked_scores(scores: list[Any], num_wanted: int, *, what: str) -> list[float]:
    """Log-probs of given tokens, which may be not a number: whoever compares them says what that means."""
    if len(scores) != num_wanted or not all(isinstance(score, int | float) for score in scores):
        raise RolloutError(f"{what} sent {shortened(scores)} where {num_wanted} log-probs of prompt tokens belong")
    return [float(score) for score in scores]


def chunk_end(reason: Any, *, what: str) -> ChunkEnd | None:
    """A server's finish reason. Raises RolloutError for one that is not known."""
    if reason is None:
        return None
    try:
        return ChunkEnd(reason)
    except ValueError:
        raise RolloutError(f"{what} ended the response by {shortened(reason)}, which is not known here") from None


def shortened(value: Any, length: int = 200) -> str:
    """For messages."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
