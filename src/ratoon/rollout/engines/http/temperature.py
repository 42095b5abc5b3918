"""Are a server's log-probs those of the distribution that it draws from?"""

# Shape letters: M drawn tokens.

import asyncio

import numpy as np

from ratoon.rollout.engines.http.link import ServerKind
from ratoon.rollout.engines.http.protocol import ResponseRequest, ServerProtocol
from ratoon.rollout.errors import RolloutError
from ratoon.types import UserError

_TEMPERATURE = 2.0
"""The highest that vLLM's server takes."""

_MOST_OFF = 0.25
"""Of the slope: 0.5 where log-probs are scaled, 1 where they are not."""

_NUM_PROMPT_TOKENS, _STRIDE = 9, 7_919
_NUM_DRAWS = 8
_LEAST_SPREAD = 0.3
"""Nats: of tokens that are more alike than that, it cannot be told and matters little."""


async def check_scaled_logprobs(server: ServerProtocol, kind: ServerKind, vocab_size: int) -> None:
    """Raises UserError where log-probs are of another temperature than the sampling's (TRL#4159): a ratio of policies
    would be off from the first step on.

    Draws a few tokens at temperature 2, and asks for their log-probs at 1. Between two tokens they differ half as much
    at 2 as at 1, whatever the policy.
    """
    prompt = [index * _STRIDE % vocab_size for index in range(1, _NUM_PROMPT_TOKENS)]  # any will do
    found = await asyncio.gather(*(_draw(server, prompt, seed) for seed in range(_NUM_DRAWS)))
    at_one_M = np.array([score for _, score in found])
    at_two_M = np.array([logprob for logprob, _ in found])
    at_one_M, at_two_M = at_one_M - at_one_M.mean(), at_two_M - at_two_M.mean()
    if np.abs(at_one_M).max() < _LEAST_SPREAD:
        return
    slope = float(at_two_M @ at_one_M / (at_one_M @ at_one_M))
    if abs(slope - 1 / _TEMPERATURE) > _MOST_OFF:
        raise UserError(
            f"the {kind.name} server's log-probs are not those of the sampling temperature: at temperature "
            f"{_TEMPERATURE:g} they differ between tokens {slope:.2f} times as much as at 1, not "
            f"{1 / _TEMPERATURE:.2f} times; {kind.scaled_logprobs}"
        )


async def _draw(server: ServerProtocol, prompt: list[int], seed: int) -> tuple[float, float]:
    """The log-prob of a token as it was drawn, and at temperature 1."""
    request = ResponseRequest(
        token_ids=prompt,
        max_tokens=1,
        temperature=_TEMPERATURE,
        stop_token_ids=[],
        seed=seed,
        request_id=f"ratoon-temperature-{seed}",
    )
    chunks = [chunk async for chunk in server.generate(request) if chunk.token_ids]
    if not chunks:
        raise RolloutError(f"the {server.name} server drew no token of one; does someone else pause it?")
    token, logprob = chunks[0].token_ids[0], chunks[0].logprobs[0]
    return logprob, (await server.score([*prompt, token]))[-1]
