"""A layout on its device, with the attention plan of each window: what travels through a model's forward pass."""

# Shape letters: T rows (of this rank's block, where ranks hold a layout together).

from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor

from ratoon.attention import AttentionPlan, AttentionRequest
from ratoon.attention.transfer import to_device
from ratoon.distributed import SequenceGroup
from ratoon.layout import PackedLayout, pad_rows
from ratoon.models.graph_attention import number_of
from ratoon.models.kept_keys import KeptKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer asks of its attention."""

    module_class: type[nn.Module]
    window: int | None
    request: AttentionRequest


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class Forest:
    """The `forest` keyword of an attached model's forward pass: `model(forest.token_ids_1T, forest=forest)`."""

    layout: PackedLayout
    """Padded to equal blocks where ranks hold it together."""

    device: torch.device

    impl: str
    """Implementation that `forest_attention` is asked for."""

    token_ids_1T: Tensor
    """[1, T] int64."""

    positions_1T: Tensor
    """[1, T] int64. Logical positions: a response continues its prompt's."""

    keeps: KeptKeys | None = None
    """Where the pass leaves its keys and values."""

    kept: KeptKeys | None = None
    """Of the layout's first rows, which this pass does not compute."""

    number: Tensor = field(init=False)
    """Stands for the forest in compiled layers."""

    sequence_group: SequenceGroup | None = None
    """The ranks that hold the layout together, each a block of its rows; None: this one has them all."""

    calls: list[AttentionCall] | None = None
    """Where a list is given, each attention call is added to it."""

    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", number_of(self))

    @property
    def first_row(self) -> int:
        """Of those that this pass computes."""
        return 0 if self.kept is None else self.kept.num_rows

    @property
    def fits_a_graph(self) -> bool:
        """Whether compiled layers may take its attention as one node: FlexAttention brings graphs of its own, an
        exchange between ranks is no part of one, and keys that are kept come from another."""
        is_plain = self.sequence_group is None and self.keeps is None and self.kept is None
        return is_plain and not self.impl.startswith("flex")

    @classmethod
    def build(
        cls,
        layout: PackedLayout,
        *,
        device: torch.device | str,
        impl: str = "auto",
        sequence_group: SequenceGroup | None = None,
        keeps: KeptKeys | None = None,
        kept: KeptKeys | None = None,
    ) -> "Forest":
        """sequence_group: the ranks that hold the layout together, each of which builds its own forest of it."""
        device = torch.device(device)
        own = slice(0 if kept is None else kept.num_rows, None)
        if sequence_group is not None:
            layout = pad_rows(layout, sequence_group.padded(layout.num_rows))
            own = sequence_group.block(layout.num_rows)
        return cls(
            layout=layout,
            device=device,
            impl=impl,
            token_ids_1T=to_device(layout.token_ids_T[own], device)[None],
            positions_1T=to_device(layout.positions_T[own], device, torch.int64)[None],
            sequence_group=sequence_group,
            keeps=keeps,
            kept=kept,
        )

    def plan_for(self, window: int | None) -> AttentionPlan:
        """The plan of a layer's window, built at the first layer that has it."""
        if window not in self._plans:
            self._plans[window] = AttentionPlan.build(
                self.layout, device=self.device, window=window, first_query_row=self.first_row
            )
        return self._plans[window]
