"""The implementations: what each can do, forward and backward, and whether this machine has what it runs on."""

import importlib.util
import os
from dataclasses import dataclass

import torch

from ratoon.attention.flash import providers as flash_providers
from ratoon.attention.request import FEATURES, AttentionRequest, Feature

_HALF = frozenset({torch.bfloat16, torch.float16})
_TO_FP32 = _HALF | {torch.float32}
_ALL_DTYPES = _TO_FP32 | {torch.float64}

_ALL_FEATURES = frozenset(FEATURES)
OF_FORWARD = _ALL_FEATURES - {"deterministic backward"}
OF_BACKWARD = _ALL_FEATURES - {"sinks"}
"""The sinks' gradient needs no kernel, and the log-sum-exp that backward kernels get has the sinks in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What one of an implementation's two passes can do."""

    features: frozenset[Feature]

    min_head_dim: int = 1
    max_head_dim: int | None = None
    """Of the larger of the two head dims; None: any."""

    is_for_one_head_dim: bool = False
    """Values have the head dim of queries and keys."""

    def lacks(self, request: AttentionRequest, relevant: frozenset[Feature]) -> list[str]:
        missing: list[str] = []
        if request.larger_head_dim < self.min_head_dim:
            missing.append(f"head dim {request.larger_head_dim} (at least {self.min_head_dim})")
        if self.is_for_one_head_dim and request.head_dim != request.v_head_dim:
            missing.append(f"head dims {request.head_dim} and {request.v_head_dim} (one for keys and values)")
        if self.max_head_dim is not None and request.larger_head_dim > self.max_head_dim:
            missing.append(f"head dim {request.larger_head_dim} (at most {self.max_head_dim})")
        return [*missing, *sorted(request.features & relevant - self.features)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplSpec:
    """An implementation with one provider of its kernels."""

    name: str
    """What `impl=` may name it by."""

    impl: str
    """What `impl=` may name it and its sister providers by."""

    provider: str

    home: str
    """Module whose functions `forward` and `backward` are its kernels."""

    device_types: frozenset[str] | None
    """None: any."""

    dtypes: frozenset[torch.dtype]
    forward: Kernel
    backward: Kernel

    architectures: frozenset[str] | None = None
    """Of `choice_table.ARCHITECTURES`, those whose GPUs it runs on; None: any that its device types have."""

    is_for_auto: bool = True
    """Whether `auto` may take it where its table says nothing."""

    has_own_autograd: bool = False
    """Its backward pass cannot be paired with another forward pass, nor the other way round."""

    def lacks(self, request: AttentionRequest, *, in_forward: bool, in_backward: bool) -> list[str]:
        """What the request needs of these passes and this has not, named."""
        missing: list[str] = []
        device_types = device_types_of(self)
        if device_types is not None and request.device_type not in device_types:
            missing.append(f"device {request.device_type}")
        if request.dtype not in self.dtypes:
            missing.append(f"dtype {request.dtype}")
        of_forward = self.forward.lacks(request, OF_FORWARD) if in_forward else []
        of_backward = self.backward.lacks(request, OF_BACKWARD) if in_backward else []
        only_backward = [lack for lack in of_backward if lack not in of_forward]
        missing += of_forward
        missing += [
            lack if lack == "deterministic backward" else f"{lack} in its backward pass" for lack in only_backward
        ]
        return missing


# In the order in which `auto` prefers them where choices.toml says nothing.
SPECS = (
    ImplSpec(
        name="flash-fa4",
        impl="flash",
        provider="fa4",
        home="ratoon.attention.flash.fa4",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        architectures=frozenset({"sm90", "sm100"}),
        forward=Kernel(features=frozenset({"softcap", "sinks"}), max_head_dim=256),
        backward=Kernel(features=frozenset({"softcap", "deterministic backward"}), max_head_dim=256),
    ),
    ImplSpec(
        name="flash-fa3",
        impl="flash",
        provider="fa3",
        home="ratoon.attention.flash.fa3",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        architectures=frozenset({"sm90"}),
        forward=Kernel(features=frozenset({"softcap", "sinks"}), max_head_dim=256),
        backward=Kernel(features=frozenset({"softcap", "deterministic backward"}), max_head_dim=256),
    ),
    ImplSpec(
        name="triton",
        impl="triton",
        provider="fused",
        home="ratoon.attention.triton.attention",
        device_types=frozenset({"cuda"}),
        dtypes=_TO_FP32,
        forward=Kernel(features=OF_FORWARD, max_head_dim=512),
        backward=Kernel(features=OF_BACKWARD, max_head_dim=512),
    ),
    ImplSpec(
        name="invariant",
        impl="invariant",
        provider="tiles",
        home="ratoon.attention.invariant.attention",
        device_types=frozenset({"cuda"}),
        dtypes=_TO_FP32,
        forward=Kernel(features=OF_FORWARD, max_head_dim=256),
        # That of `triton`.
        backward=Kernel(features=OF_BACKWARD, max_head_dim=256),
        is_for_auto=False,  # slower than the others: it spends time on a fixed order of sums
    ),
    ImplSpec(
        name="triton-adding",
        impl="triton",
        provider="fused-adding",
        home="ratoon.attention.triton.adding",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        architectures=frozenset({"sm90"}),
        forward=Kernel(features=OF_FORWARD, min_head_dim=33, max_head_dim=128, is_for_one_head_dim=True),
        # Programs add to rows of dq as they come.
        backward=Kernel(
            features=frozenset({"sliding window"}), min_head_dim=33, max_head_dim=128, is_for_one_head_dim=True
        ),
    ),
    ImplSpec(
        name="flash-fa2",
        impl="flash",
        provider="torch-fa2",
        home="ratoon.attention.flash.fa2",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        architectures=frozenset({"sm80", "sm89", "sm90", "sm100", "sm120"}),
        forward=Kernel(features=frozenset({"sinks"}), max_head_dim=256),
        # It sums dQ by atomics, in an order that changes from run to run.
        backward=Kernel(features=frozenset(), max_head_dim=256),
    ),
    ImplSpec(
        name="flex-triton",
        impl="flex",
        provider="torch-triton",
        home="ratoon.attention.flex.attention",
        device_types=frozenset({"cuda"}),
        dtypes=_TO_FP32,
        forward=Kernel(features=OF_FORWARD, max_head_dim=256),
        backward=Kernel(features=OF_BACKWARD, max_head_dim=256),
        has_own_autograd=True,
    ),
    ImplSpec(
        name="flex-fa4",
        impl="flex",
        provider="torch-fa4",
        home="ratoon.attention.flex.attention",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        architectures=frozenset({"sm90", "sm100"}),
        forward=Kernel(features=frozenset({"sliding window", "softcap"}), max_head_dim=128),
        backward=Kernel(features=frozenset({"sliding window", "softcap"}), max_head_dim=128),
        has_own_autograd=True,
    ),
    ImplSpec(
        name="flash-cpu",
        impl="flash",
        provider="torch-cpu",
        home="ratoon.attention.flash.cpu",
        device_types=frozenset({"cpu"}),
        dtypes=_ALL_DTYPES,
        forward=Kernel(features=frozenset({"sinks"})),
        backward=Kernel(features=frozenset({"deterministic backward"})),
    ),
    ImplSpec(
        name="reference",
        impl="reference",
        provider="eager",
        home="ratoon.attention.reference",
        device_types=None,
        dtypes=_ALL_DTYPES,
        forward=Kernel(features=OF_FORWARD),
        backward=Kernel(features=OF_BACKWARD),
    ),
)


SPEC_OF_NAME = {spec.name: spec for spec in SPECS}


def spec_named(name: str) -> ImplSpec:
    return SPEC_OF_NAME[name]


def why_not_here(name: str) -> str | None:
    """What this machine lacks for an implementation; None where it runs. Imports no kernel package."""
    spec = spec_named(name)
    match spec.impl:
        case "flash":
            return flash_providers.why_not_here(spec.provider)
        case "triton" | "invariant":
            if name == "triton-adding":
                return _why_no_triton() or _why_not_hopper()
            return None if _triton_is_interpreted() else _why_no_triton()
        case "flex":
            return _why_no_flex() or (flash_providers.why_not_here("fa4") if name == "flex-fa4" else None)
        case _:
            return None


def _why_no_flex() -> str | None:
    if _triton_is_interpreted():
        return "TRITON_INTERPRET is set, and torch's kernels cannot be interpreted"
    return _why_no_triton()


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "package triton is not installed"
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"a GPU of compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}, below 8.0"
    return None


def _why_not_hopper() -> str | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return "not a Hopper GPU"
    return None


def _triton_is_interpreted() -> bool:
    """Triton's own switch, read as Triton reads it: its kernels then run, slowly, on the CPU."""
    is_on = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    return is_on and importlib.util.find_spec("triton") is not None


def device_types_of(spec: ImplSpec) -> frozenset[str] | None:
    can_be_interpreted = spec.name in ("triton", "invariant")
    return frozenset({"cpu"}) if can_be_interpreted and _triton_is_interpreted() else spec.device_types
