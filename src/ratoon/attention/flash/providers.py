"""Which flash kernels this machine has. Asking costs nothing heavy: a package is imported only when its kernel runs."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache

import torch

FA4_VERSIONS = ("4.0.0b36",)
"""Versions of flash-attn-4 whose interface was read and run. Its functions are private, and change between betas."""

FA4_ARCHITECTURES = (9, 10, 11)
"""Compute capabilities, major. The package has no backward for 8, and no block lists, caps or fixed order for 12."""


@cache
def why_not_here(provider: str) -> str | None:
    """What this machine lacks for the provider's kernels; None where they run.

    provider: "torch-cpu", "torch-fa2", "fa3" or "fa4".
    """
    return _CHECKS[provider]()


def _why_not_fa2() -> str | None:
    return _why_no_cuda() or _why_not_capability(lambda major: major >= 8, "8.0 or newer")


def _why_not_fa3() -> str | None:
    return (
        _why_no_cuda()
        or _why_not_capability(lambda major: major == 9, "9.0 (Hopper)")
        or (None if importlib.util.find_spec("flash_attn_interface") else "package flash_attn_3 is not installed")
    )


def _why_not_fa4() -> str | None:
    return (
        _why_no_cuda()
        or _why_not_capability(
            lambda major: major in FA4_ARCHITECTURES, "9, 10 or 11 (Hopper and data-centre Blackwell)"
        )
        or _why_not_fa4_package()
    )


def _why_not_fa4_package() -> str | None:
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "package flash-attn-4 is not installed"
    if version not in FA4_VERSIONS:
        return f"flash-attn-4 {version} is not one of the versions that were tested ({', '.join(FA4_VERSIONS)})"
    return None if importlib.util.find_spec("cutlass") else "package nvidia-cutlass-dsl is not installed"


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "an AMD GPU, for which there are no such kernels here" if torch.version.hip is not None else None


def _why_not_capability(has_kernels: Callable[[int], bool], wanted: str) -> str | None:
    major, minor = torch.cuda.get_device_capability()
    return None if has_kernels(major) else f"a GPU of compute capability {major}.{minor}, not {wanted}"


_CHECKS: dict[str, Callable[[], str | None]] = {
    "torch-cpu": lambda: None,
    "torch-fa2": _why_not_fa2,
    "fa3": _why_not_fa3,
    "fa4": _why_not_fa4,
}
