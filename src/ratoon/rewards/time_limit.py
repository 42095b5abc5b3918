"""A time limit around code that may never return."""

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class TimeLimitError(Exception):
    """The call was given up."""


class TimeLimitedCalls:
    """Runs calls one after another on a daemon thread of its own, each within a time limit.

    A wait can be given up and a call cannot: one that never returns keeps its thread until the process ends, and
    the next call gets a new thread. One that holds the interpreter in C code for ever also holds this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] | None = None

    def __call__(self, function: Callable[[], Any], *, timeout_s: float) -> Any:
        """`function()`, or TimeLimitError once `timeout_s` have passed; what it raises is raised here."""
        if self._calls is None:
            self._calls = self._start_thread()
        call = _Call(function)
        self._calls.put(call)
        if not call.is_done.wait(timeout_s):
            self._calls.put(None)  # should it return after all, its thread ends
            self._calls = None
            raise TimeLimitError
        if call.error is not None:
            raise call.error
        return call.value

    def _start_thread(self) -> "SimpleQueue[_Call | None]":
        calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
        weakref.finalize(self, calls.put, None)
        return calls


class _Call:
    """A call, and what it came to."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # SystemExit too: user code that calls exit() must not end the thread unseen
            self.error = error
        self.is_done.set()


def _serve(calls: "SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.run()
