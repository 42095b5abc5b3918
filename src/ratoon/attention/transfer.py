"""Host arrays onto a device, without waiting for it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of an array, or of a tensor of the host, in `dtype` (its own if None).

    Onto a GPU the copy goes by way of page-locked memory and in the order of the stream: a copy of ordinary memory
    would hold the host up until all that is queued has run, and the GPU then waits for the host's next plan.
    """
    host = torch.tensor(values) if isinstance(values, np.ndarray) else values
    if dtype is not None:
        host = host.to(dtype)
    if device.type != "cuda":
        return host.to(device, copy=host is values)
    return host.pin_memory().to(device, non_blocking=True)
