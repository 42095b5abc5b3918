"""Which rollout engines can be chosen here, and why not the others. Nothing of theirs is imported."""

import warnings
from dataclasses import dataclass
from importlib.util import find_spec

from ratoon.types import UserError


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One value of `rollout.engine`."""

    name: str
    is_available: bool
    reason: str


def engine_statuses(*, has_gpu: bool) -> tuple[EngineStatus, ...]:
    """In the order of docs/engines.md."""
    kernels = "our kernels, in CUDA graphs" if has_gpu else "in torch's operations: no GPU here"
    has_client = find_spec("httpx") is not None
    server = "over HTTP, as [rollout.server] says" if has_client else "the package httpx is not installed"
    return (
        EngineStatus("transformers", True, "in the process, transformers' continuous batching"),
        EngineStatus("paged", True, f"in the process, {kernels}"),
        _vllm(),
        EngineStatus("vllm-server", has_client, server),
        EngineStatus("sglang-server", has_client, server),
    )


def _vllm() -> EngineStatus:
    from ratoon.rollout.engines.vllm.versions import TESTED, check_vllm

    if find_spec("vllm") is None:
        return EngineStatus(
            "vllm", False, "the package vllm is not installed (an environment of its own: docs/engines.md)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return EngineStatus("vllm", True, f"in the process, vllm {check_vllm()} (tested: {TESTED})")
    except UserError as error:
        return EngineStatus("vllm", False, str(error))
