"""A time limit around code that may never return."""

import threading
from collections.abc import Callable
from typing import Any


class TimeLimitError(Exception):
    """The call was given up."""


def call_within(timeout_s: float, function: Callable[[], Any], *, name: str) -> Any:
    """`function()`, or TimeLimitError once `timeout_s` have passed; what it raises is raised here.

    The call runs on a daemon thread, since a wait can be given up and a call cannot: one that never returns goes
    on until the process ends, and one that holds the interpreter in C code for ever also holds this function.
    """
    outcome = _Outcome()
    thread = threading.Thread(target=outcome.fill, args=(function,), name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome.is_done:
        raise TimeLimitError
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class _Outcome:
    """What a call on another thread came to."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False

    def fill(self, function: Callable[[], Any]) -> None:
        try:
            self.value = function()
        except BaseException as error:  # SystemExit too: user code that calls exit() must not vanish with its thread
            self.error = error
        self.is_done = True
