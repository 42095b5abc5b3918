"""Engines whose weights can be checked."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ratoon.weight_sync import WeightProbe


@runtime_checkable
class ProbedEngine(Protocol):
    """A `RolloutEngine` with weights of its own, which scores tokens for a comparison with the trainer's."""

    probe: WeightProbe

    async def score(self, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """[M] nats: the log-probs of all tokens but the first under the weights of now, at temperature 1.

        Waits for the forward pass in progress; responses in flight lose nothing.
        """
        ...
