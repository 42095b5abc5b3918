"""One call after each step: every engine serves the new weights, or the run ends."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.types.protocols import WeightReceiver


async def publish(
    weights: Mapping[str, Any], version: int, receivers: Sequence[WeightReceiver], *, timeout_s: float
) -> None:
    """Gives every receiver `weights` (name -> tensor) under `version`, and waits until all serve them.

    Raises TimeoutError, naming the receiver, if one has not answered after `timeout_s`. Receivers that
    share the trainer's tensors only take the version.
    """
    for receiver in receivers:
        try:
            await asyncio.wait_for(receiver.update_weights(weights, version), timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"{type(receiver).__name__} did not take weights of version {version} within {timeout_s:g} s; "
                "the run stops here rather than sample from old weights"
            ) from None
