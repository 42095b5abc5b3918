"""What schedules and tile sizes need to know of a GPU."""

from functools import lru_cache
from typing import NamedTuple

import torch

CPU_MULTIPROCESSORS = 8
"""What the interpreter, and a simulator, count."""


class Machine(NamedTuple):
    num_multiprocessors: int

    shared_memory_bytes: int | None
    """None: the interpreter."""

    is_hopper: bool


@lru_cache(maxsize=16)
def machine_of(device: torch.device) -> Machine:
    if device.type == "cpu":
        return Machine(num_multiprocessors=CPU_MULTIPROCESSORS, shared_memory_bytes=None, is_hopper=False)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        num_multiprocessors=properties.multi_processor_count,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        is_hopper=torch.version.hip is None and properties.major == 9,
    )
