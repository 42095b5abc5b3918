"""One thread that runs an engine's blocking calls, in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class WorkerThread:
    """Runs calls one after the other on a thread of its own, started by the first of them.

    The thread is a daemon, unlike those of `concurrent.futures`: a forward pass that never returns must not keep the
    process from ending with its error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue `call`; its future is set from the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def close(self, timeout_s: float) -> bool:
        """Let queued calls finish and end the thread; false when it has not ended after `timeout_s`."""
        if self._thread is None:
            return True
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, call = queued
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # it is the caller's, whatever it is
                future.set_exception(error)
            # Hold neither result nor error while waiting for the next call.
            del future, call, queued
