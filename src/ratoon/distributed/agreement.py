"""Work that one rank may fail at: all ranks stop together, and one of them says why."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ratoon.distributed.data_parallel import CollectiveError, DataParallel
from ratoon.types.errors import UserError, first_cause

Result = TypeVar("Result")


class OtherRankError(RuntimeError):
    """Another rank failed. It names the cause; who gets this has nothing to add, and stops."""

    def __init__(self, rank: int, message: str, *, is_users: bool) -> None:
        """is_users: it was a UserError."""
        super().__init__(f"rank {rank}: {message}")
        self.is_users = is_users


@dataclass(frozen=True, slots=True)
class _Report:
    """How one rank fared, as the others hear of it."""

    value: Any = None
    failure: str | None = None
    is_users: bool = False


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How this rank fared."""

    report: _Report
    error: Exception | None = None

    @classmethod
    def failed(cls, error: Exception) -> "_Attempt":
        if isinstance(error, CollectiveError):
            raise error  # the ranks can no longer talk to one another
        cause = first_cause(error)
        try:
            words = str(cause)
        except Exception as failure:  # of a user's class
            words = f"(its message cannot be had: {type(failure).__name__})"
        return cls(_Report(None, f"{type(cause).__name__}: {words}", isinstance(cause, UserError)), error)


def on_each(ranks: DataParallel, what: str, work: Callable[[], Result]) -> list[Result]:
    """Every rank works; returns what each one's work gave, in the order of ranks, which pickle must be able to write.

    Where some fail, all raise: the first of them its own error, the others OtherRankError. With one rank, `work` is
    just called. what: names the occasion should a rank not come.
    """
    if ranks.world_size == 1:
        return [work()]
    attempt = _try(work)
    return _settled(ranks, ranks.all_gather(what, attempt.report), attempt)


async def on_each_awaited(ranks: DataParallel, what: str, work: Awaitable[Result]) -> list[Result]:
    """`on_each` for a coroutine."""
    if ranks.world_size == 1:
        return [await work]
    attempt = await _try_awaited(work)
    return _settled(ranks, ranks.all_gather(what, attempt.report), attempt)


def on_each_kept(ranks: DataParallel, what: str, work: Callable[[], Result]) -> Result:
    """`on_each` for what cannot be sent: every rank keeps its own."""
    kept: list[Result] = []
    on_each(ranks, what, lambda: kept.append(work()))
    return kept[0]


def on_main(ranks: DataParallel, what: str, work: Callable[[], Result]) -> Result:
    """Rank 0 works; every rank returns what came of it. Failures as in `on_each`."""
    if ranks.world_size == 1:
        return work()
    attempt = _try(work) if ranks.is_main else _Attempt(_Report())
    return _settled(ranks, [ranks.broadcast(what, attempt.report)], attempt)[0]


async def on_main_awaited(ranks: DataParallel, what: str, work: Callable[[], Awaitable[Result]]) -> Result:
    """`on_main` for a coroutine, which rank 0 alone makes."""
    if ranks.world_size == 1:
        return await work()
    attempt = await _try_awaited(work()) if ranks.is_main else _Attempt(_Report())
    return _settled(ranks, [ranks.broadcast(what, attempt.report)], attempt)[0]


def _try(work: Callable[[], Any]) -> _Attempt:
    try:
        return _Attempt(_Report(work()))
    except Exception as error:
        return _Attempt.failed(error)


async def _try_awaited(work: Awaitable[Any]) -> _Attempt:
    try:
        return _Attempt(_Report(await work))
    except Exception as error:
        return _Attempt.failed(error)


def _settled(ranks: DataParallel, reports: list[_Report], attempt: _Attempt) -> list[Any]:
    for rank, report in enumerate(reports):
        if report.failure is None:
            continue
        if rank == ranks.rank:
            assert attempt.error is not None, "a rank that reports a failure has kept it"
            raise attempt.error
        raise OtherRankError(rank, report.failure, is_users=report.is_users)
    return [report.value for report in reports]
