"""Work that fails on one rank ends on all, and one of them says why."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import run_on_ranks

from ratoon.distributed import (
    CollectiveError,
    DataParallel,
    OtherRankError,
    on_each,
    on_each_awaited,
    on_main,
    on_main_awaited,
    single_process,
)
from ratoon.types import UserError


def outcome(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except OtherRankError as error:
        return f"other: {error} {error.is_users}"
    except Exception as error:
        return f"own: {type(error).__name__}: {error}"


def fails_on(ranks: DataParallel, *failing: int, users: bool = True) -> Callable[[], int]:
    def work() -> int:
        if ranks.rank in failing:
            raise (UserError if users else KeyError)(f"bad {ranks.rank}")
        return 10 * ranks.rank

    return work


def find_outcomes(ranks: DataParallel, _: Path) -> list[str]:
    async def awaited(*failing: int) -> int:
        async with asyncio.TaskGroup() as tasks:  # raises a group
            task = tasks.create_task(asyncio.to_thread(fails_on(ranks, *failing)))
        return task.result()

    async def unreached() -> str:
        assert ranks.is_main, "only rank 0 works"
        return "made on 0"

    return [
        outcome(lambda: on_each(ranks, "work", fails_on(ranks))),
        outcome(lambda: on_each(ranks, "work", fails_on(ranks, 1, users=False))),
        outcome(lambda: on_each(ranks, "work", fails_on(ranks, 0, 1))),
        outcome(lambda: on_main(ranks, "work", fails_on(ranks, 1))),
        outcome(lambda: on_main(ranks, "work", fails_on(ranks, 0))),
        outcome(lambda: asyncio.run(on_each_awaited(ranks, "work", awaited()))),
        outcome(lambda: asyncio.run(on_each_awaited(ranks, "work", awaited(1)))).partition(" (")[0],
        outcome(lambda: asyncio.run(on_main_awaited(ranks, "work", unreached))),
        *late(ranks),
    ]


def late(ranks: DataParallel) -> list[str]:
    """Rank 1 stays away: the wait ends, and says which it was."""
    if ranks.rank == 1:
        time.sleep(1.0)
        return []
    impatient = DataParallel(rank=0, world_size=2, timeout_s=0.3)
    with pytest.raises(CollectiveError) as error:
        on_each(impatient, "generated responses", lambda: 0)
    return [str(error.value)]


def test_all_ranks_hear_of_every_failure(tmp_path: Path):
    """None waits without end, and one alone tells of it."""
    first, second = run_on_ranks(2, find_outcomes, tmp_path)
    assert first[:7] == [
        "[0, 10]",
        "other: rank 1: KeyError: 'bad 1' False",
        "own: UserError: bad 0",
        "0",
        "own: UserError: bad 0",
        "[0, 10]",
        "other: rank 1: UserError: bad 1 True",
    ]
    assert second[:7] == [
        "[0, 10]",
        "own: KeyError: 'bad 1'",
        "other: rank 0: UserError: bad 0 True",
        "0",
        "other: rank 0: UserError: bad 0 True",
        "[0, 10]",
        "own: ExceptionGroup: unhandled errors in a TaskGroup",
    ]
    assert first[7] == second[7] == "'made on 0'"
    assert first[8].startswith("rank 1 did not come within 0.3 s") and "(generated responses)" in first[8]


def test_one_rank_just_works():
    marker = object()
    assert on_each(single_process(), "work", lambda: marker) == [marker]
    assert on_main(single_process(), "work", lambda: marker) is marker
    with pytest.raises(KeyError, match="bad 0"):
        on_each(single_process(), "work", fails_on(single_process(), 0, users=False))
