"""Where the time went: each second counts for one phase."""

import asyncio
import contextlib
import threading

import pytest

from ratoon.metrics import PhaseClock


class HandClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_nested_seconds_count_for_the_inner_phase_only():
    hand = HandClock()
    clock = PhaseClock(hand)
    with clock.span("evaluate"):
        hand.seconds += 1
        with clock.span("generate"):
            hand.seconds += 10
            with clock.span("reward"):
                hand.seconds += 100
        hand.seconds += 2
        with clock.span("generate"):
            hand.seconds += 20
    assert clock.total_s == {"reward": 100, "generate": 30, "evaluate": 3}
    assert sum(clock.total_s.values()) == hand.seconds - 100


def test_recent_seconds_are_taken_once_and_the_total_stays():
    hand = HandClock()
    clock = PhaseClock(hand)
    for seconds in (1, 2):
        with clock.span("update"):
            hand.seconds += seconds
        assert clock.take_recent() == {"update": seconds}
    assert clock.take_recent() == {}
    assert clock.total_s == {"update": 3}


def test_a_body_that_raises_is_counted():
    hand = HandClock()
    clock = PhaseClock(hand)
    with clock.span("evaluate"):
        with contextlib.suppress(KeyError), clock.span("reward"):
            hand.seconds += 5
            raise KeyError("a reward function's mistake")
        hand.seconds += 1
    assert clock.total_s == {"reward": 5, "evaluate": 1}


def test_concurrent_tasks_do_not_nest_in_each_other():
    hand = HandClock()
    clock = PhaseClock(hand)

    async def work(phase: str, order: list[float]) -> None:
        with clock.span(phase):
            for seconds in order:
                await asyncio.sleep(0)
                hand.seconds += seconds

    async def both() -> None:
        await asyncio.gather(work("generate", [1, 1]), work("update", [10, 10]))

    asyncio.run(both())
    assert clock.total_s == {"generate": 12, "update": 22}  # each from its own start to its own end


def test_threads_lose_no_seconds():
    clock = PhaseClock()

    def add() -> None:
        for _ in range(2_000):
            clock.add("generate", 1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.total_s == {"generate": 8_000.0}


def test_a_phase_must_be_a_name():
    with pytest.raises(ValueError, match="two words"), PhaseClock().span("two words"):
        pass
