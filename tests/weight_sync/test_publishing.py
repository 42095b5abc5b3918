"""Every receiver serves the new weights, or the run ends by name."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from ratoon.weight_sync import publish


class Receiver:
    def __init__(self, *, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.delay_s = delay_s
        self.error = error
        self.received: list[tuple[Mapping[str, Any], int]] = []

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.received.append((weights, version))


def test_every_receiver_gets_weights_and_version():
    receivers = [Receiver(), Receiver(delay_s=0.01), Receiver()]
    weights = {"w": object()}
    asyncio.run(publish(weights, 7, receivers, timeout_s=5.0))
    assert all(receiver.received == [(weights, 7)] for receiver in receivers)


def test_no_receiver_is_no_error():
    asyncio.run(publish({}, 0, [], timeout_s=1.0))


def test_silent_receiver_ends_the_run_by_name():
    with pytest.raises(TimeoutError, match=r"Receiver did not take weights of version 3 within 0\.02 s"):
        asyncio.run(publish({}, 3, [Receiver(delay_s=30.0)], timeout_s=0.02))


def test_receivers_own_error_is_not_hidden():
    """TRL#5892: a transfer that raised left a server half loaded."""
    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(publish({}, 3, [Receiver(error=ConnectionError("gone"))], timeout_s=1.0))
