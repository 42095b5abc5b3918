"""What an engine has to say of itself when it begins."""

from typing import Protocol, runtime_checkable

from ratoon.rollout.engine import RolloutEngine


@runtime_checkable
class NotingEngine(Protocol):
    """A `RolloutEngine` that says how it runs this model."""

    notes: tuple[str, ...]
    """For the run's log, a line each."""


def engine_notes(engine: RolloutEngine) -> tuple[str, ...]:
    return engine.notes if isinstance(engine, NotingEngine) else ()
