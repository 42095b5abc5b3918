"""What belongs to one event loop: the streams that run in it, and what holds them back."""

import asyncio
import itertools
import uuid
from collections.abc import Coroutine

_QUIET_S, _GRACE_S = 0.25, 5.0
"""Streams whose responses the server has ended may go on for the second, as long as one ends within the first: a
request that came to the server after its pause is held there, and would never end."""


class Session:
    """Streams of one event loop, which can be stopped together without ending those who wait for them."""

    def __init__(self, num_slots: int, *, is_open: bool) -> None:
        """num_slots: streams that may run at a time."""
        self._loop = asyncio.get_running_loop()
        self._streams: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()
        self._name = uuid.uuid4().hex[:12]
        self.slots = asyncio.Semaphore(num_slots)
        self.changing = asyncio.Lock()
        """Held by whoever starts, pauses or loads the server."""
        self.gate = asyncio.Event()
        """Set while streams may begin."""
        if is_open:
            self.gate.set()
        self.num_interrupts = 0
        self.is_recovering = False

    def is_of_this_loop(self) -> bool:
        return self._loop is asyncio.get_running_loop()

    def next_id(self) -> str:
        """Of a request; no two are alike on any server."""
        return f"ratoon-{self._name}-{next(self._ids)}"

    def close_gate(self) -> None:
        self.gate.clear()
        self.num_interrupts += 1

    def wake(self) -> None:
        """Let those who wait for the gate look whether they still want to."""
        if not self.gate.is_set():
            self.gate.set()
            self.gate.clear()

    async def run(self, stream: Coroutine[None, None, None]) -> None:
        """Wait for `stream`. Returns where `cut` ended it; raises what it raises."""
        task = self._loop.create_task(stream)
        self._streams.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._streams.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def drain(self) -> None:
        """Wait a little for the streams to end by themselves."""
        end = self._loop.time() + _GRACE_S
        while self._streams and self._loop.time() < end:
            streams = list(self._streams)
            ended, _ = await asyncio.wait(streams, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                return
            self._streams.difference_update(ended)

    async def cut(self) -> None:
        """End those that still run; the server ends their responses as the connections close."""
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        if streams:
            await asyncio.wait(streams)
