"""vLLM's server: `/v1/completions` for tokens, and the endpoints of `VLLM_SERVER_DEV_MODE=1` for all else.

Read in vllm 0.32.0: `entrypoints/openai/completion`, `entrypoints/rl/online/api_router.py`, `entrypoints/serve/dev`.
The routers of the others of `TESTED_VLLM` take and give the same, but that `/update_weight_version` begins with 0.27,
and that `/reset_prefix_cache` says nothing of its success before 0.26.
`/pause` ends every response by default (`mode=abort`) and holds back those that come later until `/resume`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from ratoon.rollout.engines.http.common_endpoints import facts_of_models, is_healthy
from ratoon.rollout.engines.http.protocol import (
    ChunkEnd,
    ResponseRequest,
    ServerFacts,
    TokenChunk,
    checked_chunk,
    checked_scores,
    chunk_end,
    shortened,
)
from ratoon.rollout.engines.http.transport import Json, RefusedError, Transport
from ratoon.rollout.errors import RolloutError
from ratoon.types import UserError

TESTED_VLLM = ">=0.20,<0.34"
"""Versions whose endpoints are those used here: run with 0.24.0, 0.26.0 and 0.32.0, each other minor version compared
in its sources."""

_FIRST_VERSION, _FIRST_UNKNOWN = (0, 20), (0, 34)
_STREAM_INTERVAL = 8
"""Tokens of one event: fewer cost the server's and our time, more are drawn in vain behind a stop string."""

_NO_LOGPROB = -9999.0
"""Stands for minus infinity in its answers."""


class VllmListing:
    """How vLLM's server is started."""

    def arguments(self, *, model: Path, name: str, host: str, port: int) -> list[str]:
        return [
            *("--model", str(model), "--served-model-name", name, "--host", host, "--port", str(port)),
            *("--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
            *("--stream-interval", str(_STREAM_INTERVAL)),
            # Else the model folder's own top_p and the like are laid over every request.
            *("--generation-config", "vllm"),
            # vLLM sets a draw's generator back where only a part of a prompt was computed, and a CPU's cannot be.
            *(() if torch.cuda.is_available() else ("--no-enable-chunked-prefill",)),
        ]

    def environment(self) -> dict[str, str]:
        return {"VLLM_SERVER_DEV_MODE": "1"}


class VllmServer:
    """See `ServerProtocol`."""

    name = "vLLM"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._model = ""

    async def is_healthy(self) -> bool:
        return await is_healthy(self._transport)

    async def facts(self) -> ServerFacts:
        """Raises UserError where the version is not one of `TESTED_VLLM`."""
        answer = await self._transport.get("/version")
        version = str(answer.get("version")) if isinstance(answer, dict) else shortened(answer)
        if not _FIRST_VERSION <= _major_minor(version) < _FIRST_UNKNOWN:
            raise UserError(
                f"the server at {self._transport.url} is vLLM {version}; vllm{TESTED_VLLM} is wanted, whose endpoints "
                "for new weights are known: install one of these for it"
            )
        facts = await facts_of_models(self._transport, self.name, version)
        self._model = facts.model_names[0]
        return facts

    async def check_serves_updates(self) -> None:
        try:
            await self._transport.get("/is_paused")
        except RefusedError as error:
            if error.status != 404:
                raise
            raise UserError(
                f"the vLLM server at {self._transport.url} has no /is_paused: it was started without "
                "VLLM_SERVER_DEV_MODE=1, which pausing and new weights need; start it with that variable"
            ) from None

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[TokenChunk, None]:
        what = f"vLLM at {self._transport.url}"
        async with aclosing(self._transport.events("/v1/completions", self._body(request))) as events:
            async for event in events:
                choice = _only_choice(event, what)
                if choice is not None:
                    yield _chunk(choice, what)

    async def score(self, token_ids: list[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "stream": False,
        }
        what = f"vLLM at {self._transport.url}"
        choice = _only_choice(await self._transport.post("/v1/completions", body), what)
        found = None if choice is None else choice.get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise RolloutError(f"{what} sent no log-prob for each of {len(token_ids)} prompt tokens")
        entries = [entry.get(str(token)) for token, entry in zip(token_ids[1:], found[1:], strict=True) if entry]
        return checked_scores([entry and entry.get("logprob") for entry in entries], len(token_ids) - 1, what=what)

    async def pause(self) -> None:
        await self._transport.post("/pause", query={"mode": "abort", "clear_cache": "true"})

    async def resume(self) -> None:
        await self._transport.post("/resume")

    async def load_weights(self, folder: Path, version: int, timeout_s: float) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
        await self._transport.post("/collective_rpc", body, timeout_s=timeout_s)
        # Blocks of the old weights would be read for prompts that begin alike.
        answer = await self._transport.post("/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(
                f"vLLM at {self._transport.url} did not forget its prefix cache, so that new responses would be drawn "
                "from keys and values of old weights: blocks are still held, though it is paused"
            )
        await self._name_weights(version)

    async def _name_weights(self, version: int) -> None:
        try:
            await self._transport.post("/update_weight_version", {"new_version": str(version)})
        except RefusedError as error:
            if error.status != 404:  # those before 0.27 keep no name
                raise

    def _body(self, request: ResponseRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            # Said outright: what is left out is taken from the model folder's generation config.
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # the ids above are all that end a response
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "request_id": request.request_id,
        }


def _only_choice(event: Any, what: str) -> dict[str, Any] | None:
    """The choice of an event of one response; None where it has none, as that of the token counts."""
    choices = event.get("choices") if isinstance(event, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RolloutError(f"{what} sent no choices: {shortened(event)}")
    if len(choices) > 1 or any(choice.get("index", 0) != 0 for choice in choices):
        raise RolloutError(f"{what} sent {len(choices)} choices where one response was asked for: {shortened(choices)}")
    return choices[0] if choices else None


def _chunk(choice: Json, what: str) -> TokenChunk:
    end = chunk_end(choice.get("finish_reason"), what=what)
    found = choice.get("logprobs")
    token_ids = choice.get("token_ids")
    if token_ids is None and end is ChunkEnd.ABORT:
        token_ids = []
    if token_ids is None:
        raise RolloutError(f"{what} sent no token_ids, which return_token_ids asks for: {shortened(choice)}")
    logprobs = found.get("token_logprobs") if isinstance(found, dict) else [] if not token_ids else None
    if isinstance(logprobs, list):
        logprobs = [None if value == _NO_LOGPROB else value for value in logprobs]
    return checked_chunk(token_ids, logprobs, end, what=what)


def _major_minor(version: str) -> tuple[int, int]:
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return (0, 0)
