"""Where the kernels of these operations are launched."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, not on its arguments'. The interpreter has none."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
