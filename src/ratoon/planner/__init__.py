"""Which rank computes which responses in which forward pass, and what that costs. No torch here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.planner.config import PlannerConfig
    from ratoon.planner.cost import CostModel, WindowCost
    from ratoon.planner.flops import attended_pairs, peak_tflops, useful_flops
    from ratoon.planner.group_shape import GroupShape
    from ratoon.planner.plan import StepPlan, plan_shapes, plan_step

_HOMES = {
    "CostModel": "cost",
    "GroupShape": "group_shape",
    "PlannerConfig": "config",
    "StepPlan": "plan",
    "WindowCost": "cost",
    "attended_pairs": "flops",
    "peak_tflops": "flops",
    "plan_shapes": "plan",
    "plan_step": "plan",
    "useful_flops": "flops",
}

__all__ = [
    "CostModel",
    "GroupShape",
    "PlannerConfig",
    "StepPlan",
    "WindowCost",
    "attended_pairs",
    "peak_tflops",
    "plan_shapes",
    "plan_step",
    "useful_flops",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
