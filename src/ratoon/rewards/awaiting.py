"""Coroutine functions in a worker. Apart from it, so that other workers start without asyncio."""

import asyncio
import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from time import perf_counter  # its own name: a function may put a clock of its own into the module
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
        turns = _Turns()

        async def call_one(call: WorkerCall) -> None:
            clock = _Clock(turns)
            value = clock.timed(start, call)
            if inspect.isawaitable(value):
                running = asyncio.ensure_future(_metered(_caught(value), clock))
                while not running.done() and (left_s := call.limit_s - clock.seconds) > 0:
                    await asyncio.wait({running}, timeout=left_s)
                if running.done():
                    value = running.result()
                else:
                    running.cancel()  # it may take no notice: nobody waits for it
                    value = GivenUpError()
            finish(call, value, clock.seconds)

        await asyncio.wait([asyncio.ensure_future(call_one(call)) for call in calls])


class _Turns:
    """How long the calls of a chunk have kept the event loop to themselves, one at a time."""

    seconds = 0.0


class _Clock:
    """Runs for one call, and stands still while another one keeps the loop: that is not this one's time."""

    def __init__(self, turns: _Turns) -> None:
        self._turns = turns
        self._own_s = 0.0
        self._others_began_at = turns.seconds
        self._started = perf_counter()

    @property
    def seconds(self) -> float:
        others_s = self._turns.seconds - self._others_began_at - self._own_s
        return perf_counter() - self._started - others_s

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in this call's turn."""
        began = perf_counter()
        try:
            return function(*arguments)
        finally:
            turn_s = perf_counter() - began
            self._own_s += turn_s
            self._turns.seconds += turn_s


async def _metered(coroutine: Coroutine[Any, Any, Any], clock: _Clock) -> Any:
    return await _in_turns(coroutine, clock)


@types.coroutine
def _in_turns(coroutine: Coroutine[Any, Any, Any], clock: _Clock) -> Generator[Any, Any, Any]:
    """Awaits it, each of its steps a turn."""
    step, argument = coroutine.send, None
    while True:
        try:
            awaited = clock.timed(step, argument)
        except StopIteration as end:
            return end.value
        try:
            step, argument = coroutine.send, (yield awaited)
        except BaseException as error:
            step, argument = coroutine.throw, error


async def _caught(awaitable: Awaitable[Any]) -> Any:
    """What it returns or raises: an event loop would let exit() end the worker."""
    try:
        return await awaitable
    except BaseException as error:
        return error
