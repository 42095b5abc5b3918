"""Coroutine functions in a worker. Apart from it, so that other workers start without asyncio."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ratoon.rewards.messages import WorkerCall
from ratoon.rewards.scorers import GivenUpError


class Awaiter:
    """An event loop for good: what a function keeps from call to call, a session say, may belong to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def value_of(self, awaitable: Awaitable[Any]) -> Any:
        """What it returns; an exception that it raises is returned too."""
        return self._loop.run_until_complete(_caught(awaitable))

    def call_all(
        self,
        calls: Sequence[WorkerCall],
        start: Callable[[WorkerCall], Any],
        finish: Callable[[WorkerCall, Any, float], None],
    ) -> None:
        """Starts all calls and finishes each, with its value and seconds, as it returns or its time is up."""
        self._loop.run_until_complete(self._call_all(calls, start, finish))

    async def _call_all(
        self,
        calls: Sequence[WorkerCall],
        start: Callable[[WorkerCall], Any],
        finish: Callable[[WorkerCall, Any, float], None],
    ) -> None:
        async def call_one(call: WorkerCall) -> None:
            started = time.perf_counter()
            value = start(call)
            if inspect.isawaitable(value):
                running = asyncio.ensure_future(_caught(value))
                await asyncio.wait({running}, timeout=call.limit_s)
                if running.done():
                    value = running.result()
                else:
                    running.cancel()  # it may take no notice: nobody waits for it
                    value = GivenUpError()
            finish(call, value, time.perf_counter() - started)

        await asyncio.wait([asyncio.ensure_future(call_one(call)) for call in calls])


async def _caught(awaitable: Awaitable[Any]) -> Any:
    """What it returns or raises: an event loop would let exit() end the worker."""
    try:
        return await awaitable
    except BaseException as error:
        return error
