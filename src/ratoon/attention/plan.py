"""What the kernels need to know of a layout: built once a microbatch, read by every layer."""

# Shape letters: T rows, S segments.

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ratoon.attention.transfer import to_device
from ratoon.layout import PackedLayout

Schedule = TypeVar("Schedule")
Sizes = ParamSpec("Sizes")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """A layout's attention, on one device, for one window.

    Every length is a host integer, so no layer waits for the device.
    """

    num_rows: int

    device: torch.device

    window: int | None
    """Row q reads key k only if position[q] - position[k] < window. None where it would hide nothing."""

    positions_T: Tensor
    """[T] int32. Logical position of each row in its sequence."""

    expiry_T: Tensor
    """[T] int32. The row at which a key stops being read."""

    layout: PackedLayout

    first_query_row: int = 0
    """Rows before it bring keys and values only: their queries come from nowhere, and their output is not computed."""

    _schedules: dict[tuple[Hashable, ...], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        layout: PackedLayout,
        device: torch.device | str = "cpu",
        window: int | None = None,
        *,
        first_query_row: int = 0,
    ) -> "AttentionPlan":
        """One plan for each distinct window; layers that have the window share it.

        A window that no sequence outgrows is the same as none, and becomes None.
        first_query_row: of a layout whose first rows have been computed before, and are only read.
        """
        if not isinstance(layout, PackedLayout):
            raise ValueError(
                f"layout must be a PackedLayout, got {type(layout).__name__}; "
                "make one with ratoon.layout.pack_groups, pack_sequences or pack_documents"
            )
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(
                f"window must be a number of tokens, at least 1 (a row always reads itself), got {window!r}; "
                "pass None for global attention"
            )
        if not 0 <= first_query_row <= layout.num_rows:
            raise ValueError(f"first_query_row must be in [0, {layout.num_rows}], got {first_query_row}")
        device = _device_here(device)
        if window is not None and window > int(layout.positions_T.max(initial=0)):
            window = None
        return cls(
            num_rows=layout.num_rows,
            device=device,
            window=window,
            positions_T=to_device(layout.positions_T, device),
            expiry_T=to_device(layout.expiry_T, device),
            layout=layout,
            first_query_row=first_query_row,
        )

    @property
    def num_query_rows(self) -> int:
        return self.num_rows - self.first_query_row

    def schedule(
        self,
        build: "Callable[Concatenate[AttentionPlan, Sizes], Schedule]",
        *sizes: Sizes.args,
        **named_sizes: Sizes.kwargs,
    ) -> Schedule:
        """`build(self, *sizes)`, built at the first call: layers share it, and kernels that never run cost nothing."""
        key = (build, *sizes, *sorted(named_sizes.items()))
        if key not in self._schedules:
            self._schedules[key] = build(self, *sizes, **named_sizes)
        return cast(Schedule, self._schedules[key])


def _device_here(device: torch.device | str) -> torch.device:
    """The device as tensors made there report it: `cuda:0` for `cuda`, `cpu` for `cpu:0`."""
    try:
        return torch.empty(0, device=device if isinstance(device, torch.device) else torch.device(device)).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has no type of its own for this
        reason = (str(error).strip().splitlines() or ["torch does not say why"])[0]
        raise ValueError(f"device must name a device of this machine, got {device!r}: {reason}") from error
