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
    if device.type == "cuda":
        return _page_locked(values, dtype).to(device, non_blocking=True)
    host = torch.tensor(values) if isinstance(values, np.ndarray) else values
    if dtype is not None:
        host = host.to(dtype)
    return host.to(device, copy=host is values)


def _page_locked(values: NDArray[Any] | Tensor, dtype: torch.dtype | None) -> Tensor:
    """NumPy writes it: from 32,768 numbers on torch would wake a thread a core, and wait for the slowest to wake."""
    if isinstance(values, Tensor):
        dtype = dtype or values.dtype
        if torch.bfloat16 in (dtype, values.dtype):  # NumPy does not have it
            return values.to(dtype).pin_memory()
        values = values.detach().numpy()
    dtype = dtype or torch.from_numpy(np.empty(0, values.dtype)).dtype
    # the device is said: a caller who builds a model may have made the GPU torch's default
    locked = torch.empty(values.shape, dtype=dtype, device="cpu", pin_memory=True)
    np.copyto(locked.numpy(), values, casting="unsafe")
    return locked
