"""A layout on its device, with the attention plan of each window: what travels through a model's forward pass."""

# Shape letters: T rows.

from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor

from ratoon.attention import AttentionPlan, AttentionRequest
from ratoon.attention.transfer import to_device
from ratoon.layout import PackedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer asks of its attention."""

    module_class: type[nn.Module]
    window: int | None
    request: AttentionRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """The `forest` keyword of an attached model's forward pass: `model(forest.token_ids_1T, forest=forest)`."""

    layout: PackedLayout

    device: torch.device

    impl: str
    """Implementation that `forest_attention` is asked for."""

    token_ids_1T: Tensor
    """[1, T] int64."""

    positions_1T: Tensor
    """[1, T] int64. Logical positions: a response continues its prompt's."""

    calls: list[AttentionCall] | None = None
    """Where a list is given, each attention call is added to it."""

    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    @classmethod
    def build(cls, layout: PackedLayout, *, device: torch.device | str, impl: str = "auto") -> "Forest":
        device = torch.device(device)
        return cls(
            layout=layout,
            device=device,
            impl=impl,
            token_ids_1T=to_device(layout.token_ids_T, device)[None],
            positions_1T=to_device(layout.positions_T, device, torch.int64)[None],
        )

    def plan_for(self, window: int | None) -> AttentionPlan:
        """The plan of a layer's window, built at the first layer that has it."""
        if window not in self._plans:
            self._plans[window] = AttentionPlan.build(self.layout, device=self.device, window=window)
        return self._plans[window]
