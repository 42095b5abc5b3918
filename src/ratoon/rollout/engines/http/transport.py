"""Requests to a server: JSON to and fro, streams of events, and every failure under a name."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx

from ratoon.rollout.engines.http.protocol import ServerLostError, shortened
from ratoon.rollout.errors import RolloutError

Json = Mapping[str, Any]

_STATUS_TIMEOUT_S = 5.0

_LARGEST_EVENT_BYTES = 64 << 20
"""More than any event holds; a server that sends more without an end of line is not one of ours."""


class Transport:
    """One server's address. Used from one event loop; `close` it there."""

    def __init__(self, url: str, *, name: str, api_key: str | None, timeout_s: float) -> None:
        """name: of the server, for messages. timeout_s: of each request that does not say."""
        self.url = url
        self._name = name
        self._timeout_s = timeout_s
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, pool=None),
            # One connection for each response in flight, and those of control besides.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            # A proxy of the environment is for the world outside.
            trust_env=False,
            # Reading all certificates takes a second, and plain HTTP has none.
            verify=url.startswith("https:"),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """The JSON of an answer; None where it is empty. Raises as `ServerProtocol` says."""
        return await self._ask("GET", path, None, None, self._timeout_s)

    async def post(
        self, path: str, body: Json | None = None, *, query: Json | None = None, timeout_s: float | None = None
    ) -> Any:
        """As `get`."""
        return await self._ask("POST", path, body, query, timeout_s or self._timeout_s)

    async def status(self, path: str) -> int:
        """The HTTP status of a GET, which a server that is well gives at once."""
        timeout_s = min(self._timeout_s, _STATUS_TIMEOUT_S)
        try:
            return (await self._client.get(path, timeout=httpx.Timeout(timeout_s, pool=None))).status_code
        except httpx.HTTPError as error:
            raise self._lost(f"GET {path}", error, timeout_s) from error

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """The objects of a stream of server-sent events, up to its end. What is between two may take for ever: whoever
        reads has a timeout.

        Raises ServerLostError for a stream that breaks off, RolloutError for one that holds anything else.
        """
        what = f"POST {path}"
        timeout = httpx.Timeout(self._timeout_s, read=None, pool=None)
        try:
            async with self._client.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise self._refused(what, answer)
                async for line in self._lines(answer, what):
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield self._event(data, what)
        except httpx.HTTPError as error:
            raise self._lost(what, error, self._timeout_s) from error
        raise ServerLostError(f"{self._where(what)}: the stream broke off before its end")

    async def _lines(self, answer: httpx.Response, what: str) -> AsyncIterator[str]:
        rest = b""
        async for part in answer.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
            if len(rest) > _LARGEST_EVENT_BYTES:
                raise RolloutError(f"{self._where(what)}: an event of more than {_LARGEST_EVENT_BYTES >> 20} MiB")
        if rest:
            yield rest.decode(errors="replace")

    def _event(self, data: str, what: str) -> Json:
        try:
            event = json.loads(data)
        except ValueError:
            raise RolloutError(f"{self._where(what)}: an event is not JSON: {shortened(data)}") from None
        if not isinstance(event, dict):
            raise RolloutError(f"{self._where(what)}: an event is no object: {shortened(event)}")
        if event.get("error"):
            raise RolloutError(f"{self._where(what)}: the server failed: {_message(event)}")
        return event

    async def _ask(self, method: str, path: str, body: Json | None, query: Json | None, timeout_s: float) -> Any:
        what = f"{method} {path}"
        try:
            answer = await self._client.request(
                method, path, json=body, params=query, timeout=httpx.Timeout(timeout_s, pool=None)
            )
        except httpx.HTTPError as error:
            raise self._lost(what, error, timeout_s) from error
        if answer.status_code != httpx.codes.OK:
            raise self._refused(what, answer)
        if not answer.content.strip():
            return None
        try:
            return answer.json()
        except ValueError:
            raise RolloutError(f"{self._where(what)}: the answer is not JSON: {shortened(answer.text)}") from None

    def _where(self, what: str) -> str:
        return f"{self._name} at {self.url}, {what}"

    def _lost(self, what: str, error: httpx.HTTPError, timeout_s: float) -> ServerLostError:
        if isinstance(error, httpx.TimeoutException):
            return ServerLostError(f"{self._where(what)}: no answer within {timeout_s:g} s")
        reason = str(error) or "the connection was closed"
        return ServerLostError(f"{self._where(what)}: {type(error).__name__}: {reason}")

    def _refused(self, what: str, answer: httpx.Response) -> RolloutError:
        try:
            message = _message(answer.json())
        except ValueError:
            message = shortened(answer.text)
        return RefusedError(f"{self._where(what)}: HTTP {answer.status_code}: {message}", answer.status_code)


class RefusedError(RolloutError):
    """The server answered a request with an error."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP."""


def _message(answer: Any) -> str:
    """What an answer says went wrong, in the forms that servers have for it."""
    if not isinstance(answer, dict):
        return shortened(answer)
    error = answer.get("error", answer)
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", error))
    return error if isinstance(error, str) else shortened(error)
