"""How much memory a device has, and how much of it an estimate may fill."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import torch

from ratoon.planner.memory_sizes import GIB

DeviceType = Literal["cpu", "cuda"]

_CUDA_MARGIN = 0.08
_CUDA_CONTEXT_BYTES = GIB
"""The driver's context and loaded kernels, and workspaces of matrix products, which no estimate counts."""

_CPU_MARGIN = 0.2
"""Freed blocks do not fit new ones: a process takes up to a quarter more than its tensors."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of one GPU, or of the host for one process."""

    device_type: DeviceType
    total_bytes: int
    usable_bytes: int
    """What an estimate may fill: what is free, less the margin."""

    num_sharers: int = 1
    """Processes that have the host's memory together; the bytes are one's share of it."""

    @classmethod
    def of_total(cls, device_type: DeviceType, total_bytes: int, available_bytes: int | None = None) -> "DeviceMemory":
        """available_bytes: free, or this process's already; None: everything."""
        available = total_bytes if available_bytes is None else min(available_bytes, total_bytes)
        if device_type == "cuda":
            # The margin is the device's own: it does not shrink with what others take.
            usable = min(available, total_bytes - _CUDA_CONTEXT_BYTES) - int(_CUDA_MARGIN * total_bytes)
        else:
            usable = int((1 - _CPU_MARGIN) * available)
        return cls(device_type=device_type, total_bytes=total_bytes, usable_bytes=max(usable, 0))

    @classmethod
    def here(cls, device: torch.device) -> "DeviceMemory":
        """Of this machine, now. On the host, control groups' limits count as memory that is not there."""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls.of_total("cuda", total, free + torch.cuda.memory_reserved(device))
        memory = psutil.virtual_memory()
        limits = list(_cgroup_limits(_CGROUPS, _OWN_CGROUP))
        return cls.of_total(
            "cpu",
            min([memory.total, *(limit for limit, _ in limits)]),
            max(min([memory.available, *(limit - used for limit, used in limits)]), 0),
        )

    def shared_by(self, num_processes: int) -> "DeviceMemory":
        """What one of so many processes of a host may count on. A GPU is one process's own."""
        assert self.num_sharers == 1, "a host's memory is shared out once"
        if self.device_type == "cuda":
            return self
        return replace(
            self,
            total_bytes=self.total_bytes // num_processes,
            usable_bytes=self.usable_bytes // num_processes,
            num_sharers=num_processes,
        )

    @property
    def margin(self) -> str:
        """What is left free, in words."""
        if self.device_type == "cuda":
            return f"{_CUDA_MARGIN:.0%} of the GPU and {_CUDA_CONTEXT_BYTES / GIB:.0f} GiB are left free"
        shared = "" if self.num_sharers == 1 else f", and {self.num_sharers} processes share the machine's memory"
        return f"{_CPU_MARGIN:.0%} of the memory that is free now is left so{shared}"


def _cgroup_limits(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Limit and bytes in use of each control group that this process is in, the outer ones too, of either version."""
    for folder in dict.fromkeys((root, root / "memory", *_own_cgroups(root, own))):
        yield from _limit_of(folder, "memory.max", "memory.current", "inactive_file")
        yield from _limit_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _own_cgroups(root: Path, own: Path) -> Iterator[Path]:
    """From the lines `NUMBER:CONTROLLERS:PATH`; version 2 names no controllers."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            parts = Path(path.lstrip("/")).parts
            for depth in range(len(parts)):
                yield (root / controllers).joinpath(*parts[: depth + 1])


def _limit_of(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    limit, used = _text(folder / limit_file).strip(), _text(folder / used_file).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return  # "max", or no such file
    fields = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    yield int(limit), int(used) - int(fields.get(reclaimable, 0))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
