"""What a rank says when it has lost another one. Torch's own words stand in the traceback alone: they name no rank."""

import re

import torch

_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_NAMED_BY_BARRIER = re.compile(r"Ranks ([\d, ]*\d) failed to pass monitoredBarrier")


def whom_barrier_names(error: RuntimeError) -> str | None:
    """The ranks that did not come, in words; torch names them on rank 0 alone."""
    found = _NAMED_BY_BARRIER.search(str(error))
    if found is None:
        return None
    return f"rank{'s' if ',' in found[1] else ''} {found[1]}"


def other_than(rank: int, world_size: int) -> str:
    """Whom this rank waits for where torch does not say, in words."""
    return f"rank {1 - rank}" if world_size == 2 else "another rank"


def describe_loss(
    who: str, what: str, error: RuntimeError, *, waiter: str, limit_s: float | None = None, waited_s: float = 0.0
) -> str:
    """who: has not come. what: to which exchange. waiter: this rank, in words. limit_s: of the wait, where it is known.
    waited_s: how long it was; 0 where only the error tells that it was too long."""
    if isinstance(error, torch.OutOfMemoryError):  # this rank's own: nobody else is to be looked for
        said = str(error).splitlines()[0]
        return f"{waiter} ran out of memory in an exchange ({what}): {said}. Lower planner.max_rows_per_microbatch"
    is_late = _LATE.search(str(error)) is not None or (limit_s is not None and waited_s >= limit_s)
    if is_late:
        limit = "in time" if limit_s is None else f"within {limit_s:g} s"
        happened = f"did not come {limit} (trainer.rank_timeout_s)"
        advice = "It hangs, or works for longer than that: look at what it does, or raise trainer.rank_timeout_s"
    else:
        happened = "was lost"
        advice = "It ended or cannot be reached: look for its own first error"
    return (
        f"{who} {happened}: {waiter} waited for it in an exchange ({what}). {advice}. The same command goes on from "
        "the last checkpoint"
    )
