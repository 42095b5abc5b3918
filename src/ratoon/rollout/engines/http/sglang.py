"""SGLang's server: `/generate` with token ids, and its endpoints for pausing and new weights.

Names as of sglang 0.5.23. `/update_weights_from_disk` and `/update_weight_version` end every response unless
`abort_all_requests` is false (miles#2589); the server is paused then, so that nothing runs either way.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

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

_STREAM_INTERVAL = 8
_LARGEST_SEED = 2**31 - 1


class SglangListing:
    """How SGLang's server is started."""

    def arguments(self, *, model: Path, name: str, host: str, port: int) -> list[str]:
        return [
            *("--model-path", str(model), "--served-model-name", name, "--host", host, "--port", str(port)),
            *("--stream-interval", str(_STREAM_INTERVAL)),
        ]

    def environment(self) -> dict[str, str]:
        return {}


class SglangServer:
    """See `ServerProtocol`."""

    name = "SGLang"

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def is_healthy(self) -> bool:
        return await is_healthy(self._transport)

    async def facts(self) -> ServerFacts:
        """Raises UserError where the version is not of the 0.5 line."""
        info = await self._transport.get("/get_server_info")
        version = str(info.get("version")) if isinstance(info, dict) else shortened(info)
        if not version.startswith("0.5."):
            raise UserError(
                f"the server at {self._transport.url} is SGLang {version}; one of the 0.5 line is wanted, whose "
                "endpoints for new weights are known"
            )
        return await facts_of_models(self._transport, self.name, version)

    async def check_serves_updates(self) -> None:
        try:
            await self._transport.post("/continue_generation", {})
        except RefusedError as error:
            if error.status != 404:
                raise
            raise UserError(
                f"the SGLang server at {self._transport.url} has no /continue_generation, which pausing and new "
                "weights need; use a newer one of the 0.5 line"
            ) from None

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[TokenChunk, None]:
        what = f"SGLang at {self._transport.url}"
        num_taken = 0
        async with aclosing(self._transport.events("/generate", _body(request))) as events:
            async for event in events:
                chunk = _chunk(event, num_taken, what)
                num_taken += len(chunk.token_ids)
                yield chunk

    async def score(self, token_ids: list[int]) -> list[float]:
        body = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        what = f"SGLang at {self._transport.url}"
        meta = _meta(await self._transport.post("/generate", body), what)
        found = meta.get("input_token_logprobs")
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise RolloutError(f"{what} sent no log-prob for each of {len(token_ids)} prompt tokens")
        scores = [entry[0] for entry in found[1:] if isinstance(entry, list | tuple) and entry]
        return checked_scores(scores, len(token_ids) - 1, what=what)

    async def pause(self) -> None:
        await self._transport.post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self._transport.post("/continue_generation", {})

    async def load_weights(self, folder: Path, version: int, timeout_s: float) -> None:
        body = {
            "model_path": str(folder),
            "abort_all_requests": False,
            "flush_cache": True,
            "weight_version": str(version),
        }
        answer = await self._transport.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RolloutError(f"SGLang at {self._transport.url} did not take the weights: {shortened(answer)}")


def _body(request: ResponseRequest) -> dict[str, Any]:
    return {
        "rid": request.request_id,
        "input_ids": request.token_ids,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # the ids above are all that end a response
            "sampling_seed": request.seed % _LARGEST_SEED,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }


def _meta(event: Any, what: str) -> Json:
    meta = event.get("meta_info") if isinstance(event, dict) else None
    if not isinstance(meta, dict):
        raise RolloutError(f"{what} sent no meta_info of one response: {shortened(event)}")
    return meta


def _chunk(event: Json, num_taken: int, what: str) -> TokenChunk:
    """What an event has beyond the first `num_taken` tokens. Servers send either all tokens so far or the new ones."""
    meta = _meta(event, what)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    end = chunk_end(kind, what=what)
    if end is ChunkEnd.ABORT and isinstance(reason, dict) and (reason.get("status_code") or 0) >= 400:
        raise RolloutError(f"{what} gave the response up: {shortened(reason.get('message'))}")
    found = meta.get("output_token_logprobs")
    if found is None:
        found = []
    num_tokens = meta.get("completion_tokens")
    if not isinstance(found, list) or type(num_tokens) is not int:
        raise RolloutError(f"{what} sent no output_token_logprobs with completion_tokens: {shortened(meta)}")
    if len(found) == num_tokens:
        found = found[num_taken:]
    elif len(found) != num_tokens - num_taken:
        raise RolloutError(
            f"{what} sent {len(found)} log-probs of a response of {num_tokens} tokens, {num_taken} of which were there"
        )
    if not all(isinstance(entry, list | tuple) and len(entry) >= 2 for entry in found):
        raise RolloutError(f"{what} sent {shortened(found)} where (log-prob, token id) pairs belong")
    return checked_chunk([entry[1] for entry in found], [entry[0] for entry in found], end, what=what)
