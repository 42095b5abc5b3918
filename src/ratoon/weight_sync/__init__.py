"""Moving the policy's weights to whoever samples from them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.weight_sync.bucketing import iter_buckets
    from ratoon.weight_sync.naming import CheckpointNames, WeightStream, WeightSyncError, check_same_names
    from ratoon.weight_sync.probe import ProbeGap, ProbeScores, WeightProbe, probe_tokens
    from ratoon.weight_sync.publishing import publish

_HOMES = {
    "CheckpointNames": "naming",
    "ProbeGap": "probe",
    "ProbeScores": "probe",
    "WeightProbe": "probe",
    "WeightStream": "naming",
    "WeightSyncError": "naming",
    "check_same_names": "naming",
    "iter_buckets": "bucketing",
    "probe_tokens": "probe",
    "publish": "publishing",
}

__all__ = [
    "CheckpointNames",
    "ProbeGap",
    "ProbeScores",
    "WeightProbe",
    "WeightStream",
    "WeightSyncError",
    "check_same_names",
    "iter_buckets",
    "probe_tokens",
    "publish",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
