"""Updates of the policy, its optimizer, and what a run writes to disk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.trainer.config import SftConfig, TrainerConfig
    from ratoon.trainer.microbatch import Update
    from ratoon.trainer.optimizer import MasterOptimizer
    from ratoon.trainer.reference import ReferenceScore, frozen_reference
    from ratoon.trainer.step_result import StepResult
    from ratoon.trainer.trainer import Trainer

_HOMES = {
    "MasterOptimizer": "optimizer",
    "ReferenceScore": "reference",
    "SftConfig": "config",
    "StepResult": "step_result",
    "Trainer": "trainer",
    "TrainerConfig": "config",
    "Update": "microbatch",
    "frozen_reference": "reference",
}

__all__ = [
    "MasterOptimizer",
    "ReferenceScore",
    "SftConfig",
    "StepResult",
    "Trainer",
    "TrainerConfig",
    "Update",
    "frozen_reference",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
