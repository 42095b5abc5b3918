"""Seconds by phase of a run."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class _OpenSpan:
    inner_s: float = 0.0
    """Seconds that spans inside this one have taken."""


# Context-local, so that concurrent asyncio tasks and threads nest their spans independently.
_INNERMOST: ContextVar[_OpenSpan | None] = ContextVar("ratoon_innermost_span", default=None)


class PhaseClock:
    """Measures named phases. A second inside nested spans counts for the innermost one only.

    So the phases of sequential code sum to at most the wall clock. Spans of concurrent tasks overlap, and their sum may
    exceed it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: seconds from any fixed origin, never decreasing."""
        self._now = now
        self._lock = threading.Lock()
        self._recent: dict[str, float] = {}
        self._total: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Counts the body's seconds for `phase`, also when the body raises."""
        if not phase.isidentifier():
            raise ValueError(f"a phase is a name such as 'generate', got {phase!r}")
        outer = _INNERMOST.get()
        this = _OpenSpan()
        token = _INNERMOST.set(this)
        start_s = self._now()
        try:
            yield
        finally:
            elapsed_s = self._now() - start_s
            _INNERMOST.reset(token)
            if outer is not None:
                outer.inner_s += elapsed_s
            # Concurrent tasks begun inside a span can spend more than its own wall clock.
            self.add(phase, max(elapsed_s - this.inner_s, 0.0))

    def add(self, phase: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere."""
        with self._lock:
            self._recent[phase] = self._recent.get(phase, 0.0) + seconds
            self._total[phase] = self._total.get(phase, 0.0) + seconds

    def add_past(self, phase: str, seconds: float) -> None:
        """Counts seconds of an earlier process of this run: in the total, not since the last `take_recent`."""
        with self._lock:
            self._total[phase] = self._total.get(phase, 0.0) + seconds

    def forget(self) -> None:
        """Starts again from nothing."""
        with self._lock:
            self._recent.clear()
            self._total.clear()

    def take_recent(self) -> dict[str, float]:
        """Seconds by phase since the previous call."""
        with self._lock:
            recent, self._recent = self._recent, {}
        return recent

    @property
    def total_s(self) -> dict[str, float]:
        """Seconds by phase of the whole run, in the order in which phases first ended."""
        with self._lock:
            return dict(self._total)
