"""Which implementations there are, what each can do, and which one a call gets."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Feature = Literal["sliding window", "softcap", "sinks", "deterministic backward"]

_HALF = frozenset({torch.bfloat16, torch.float16})
_ALL_DTYPES = _HALF | {torch.float32, torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """What a call needs of an implementation."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    features: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImplSpec:
    impl: str
    provider: str

    device_types: frozenset[str] | None
    """None: any."""

    dtypes: frozenset[torch.dtype]
    features: frozenset[Feature]

    max_head_dim: int | None = None
    """Of the larger of the two head dims; None: any."""

    same_head_dims: bool = False
    """The value head dim must be the query's."""

    @property
    def name(self) -> str:
        return f"{self.impl} ({self.provider})"

    def lacks(self, request: AttentionRequest) -> tuple[str, ...]:
        """What the request needs and this has not, named."""
        missing: list[str] = []
        if self.device_types is not None and request.device_type not in self.device_types:
            missing.append(f"device {request.device_type}")
        if request.dtype not in self.dtypes:
            missing.append(f"dtype {request.dtype}")
        head_dim = max(request.head_dim, request.v_head_dim)
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            missing.append(f"head dim {head_dim} (at most {self.max_head_dim})")
        if self.same_head_dims and request.head_dim != request.v_head_dim:
            missing.append(f"a value head dim ({request.v_head_dim}) unlike the query's ({request.head_dim})")
        missing.extend(sorted(request.features - self.features))
        return tuple(missing)


# In the order in which `auto` prefers them.
_SPECS = (
    _ImplSpec(
        impl="flash",
        provider="torch-cpu",
        device_types=frozenset({"cpu"}),
        dtypes=_ALL_DTYPES,
        features=frozenset({"sinks", "deterministic backward"}),
    ),
    _ImplSpec(
        impl="flash",
        provider="torch-fa2",
        device_types=frozenset({"cuda"}),
        dtypes=_HALF,
        # FA2 sums dQ by atomics, in an order that changes from run to run.
        features=frozenset({"sinks"}),
        max_head_dim=256,
    ),
    _ImplSpec(
        impl="reference",
        provider="eager",
        device_types=None,
        dtypes=_ALL_DTYPES,
        features=frozenset({"sliding window", "softcap", "sinks", "deterministic backward"}),
    ),
)

_NOT_BUILT_YET = {
    "flex": "FlexAttention is not available in this version of ratoon yet",
    "triton": "the fused Triton kernel is not available in this version of ratoon yet",
}

IMPL_NAMES = ("auto", "reference", "flash", *_NOT_BUILT_YET)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplStatus:
    """Whether an implementation can run on this machine."""

    impl: str
    provider: str
    is_available: bool

    reason: str
    """Why not; what it runs on where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplChoice:
    """What a call gets, and why."""

    impl: str
    provider: str
    reason: str


def available_impls() -> tuple[ImplStatus, ...]:
    """Every implementation by name, in the order in which `auto` prefers them."""
    statuses = [
        ImplStatus(
            impl=spec.impl,
            provider=spec.provider,
            is_available=_why_not_here(spec) is None,
            reason=_why_not_here(spec) or f"runs on {_device_names(spec)}",
        )
        for spec in _SPECS
    ]
    statuses += [
        ImplStatus(impl=impl, provider="", is_available=False, reason=reason) for impl, reason in _NOT_BUILT_YET.items()
    ]
    return tuple(statuses)


@lru_cache(maxsize=1024)
def resolve_impl(request: AttentionRequest, impl: str = "auto") -> ImplChoice:
    """The implementation that serves the request: the one named, or for `auto` the first that can.

    Raises ValueError, naming what is missing and who has it, where the named one cannot serve.
    """
    if impl in _NOT_BUILT_YET:
        raise ValueError(
            f"impl={impl!r} cannot run: {_NOT_BUILT_YET[impl]}; use 'auto', or one of: {_who_has(request)}"
        )
    if impl not in IMPL_NAMES:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPL_NAMES))}, got {impl!r}")
    refusals: list[str] = []
    for spec in _SPECS if impl == "auto" else _specs_of(impl, request.device_type):
        problem = _problem(spec, request)
        if problem is None:
            reason = "; ".join([f"{spec.name} has all that is asked for", *refusals])
            return ImplChoice(impl=spec.impl, provider=spec.provider, reason=reason)
        refusals.append(problem)
    raise ValueError(
        f"impl={impl!r} cannot run this attention: {'; '.join(refusals)}. "
        f"Implementations that can: {_who_has(request)}; 'auto' takes the first of them"
    )


def _specs_of(impl: str, device_type: str) -> list[_ImplSpec]:
    """The providers of an implementation on the device; all of them where none fits."""
    specs = [spec for spec in _SPECS if spec.impl == impl]
    return [spec for spec in specs if spec.device_types is None or device_type in spec.device_types] or specs


def _problem(spec: _ImplSpec, request: AttentionRequest) -> str | None:
    missing = spec.lacks(request)
    if missing:
        return f"{spec.name} has no {', '.join(missing)}"
    why_not = _why_not_here(spec)
    return f"{spec.name} cannot run here: {why_not}" if why_not else None


def _who_has(request: AttentionRequest) -> str:
    return ", ".join(spec.name for spec in _SPECS if _problem(spec, request) is None) or "none"


def _device_names(spec: _ImplSpec) -> str:
    return "any device" if spec.device_types is None else ", ".join(sorted(spec.device_types))


def _why_not_here(spec: _ImplSpec) -> str | None:
    """What this machine lacks; None where the implementation runs."""
    if spec.provider != "torch-fa2":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "an AMD GPU, for which torch has no FlashAttention-2 of its own"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"a GPU of compute capability {major}.{minor}, below 8.0"
