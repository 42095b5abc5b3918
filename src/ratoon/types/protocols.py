"""Protocols that two packages of one layer share."""

from collections.abc import Mapping
from typing import Any, Protocol


class WeightReceiver(Protocol):
    """Whatever must follow the policy's weights: a rollout engine."""

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Serve `weights` (name -> tensor, as in the model's state dict) from now on, stamped `version`.

        An engine that shares the trainer's tensors ignores `weights` and takes the version.
        """
        ...
