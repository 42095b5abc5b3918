"""What the kernels need to know of a layout: built once a microbatch, read by every layer."""

# Shape letters: T rows, S segments.

from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.attention.flash.schedule import CpuSchedule, VarlenSchedule, build_cpu_schedule, build_varlen_schedule
from ratoon.attention.row_blocks import RowBlock, build_row_blocks
from ratoon.layout import PackedLayout


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

    row_blocks: tuple[RowBlock, ...]
    """The reference's schedule."""

    flash: CpuSchedule | VarlenSchedule | None
    """The flash kernels' schedule on this device; None where they cannot express the plan (a window)."""

    @classmethod
    def build(
        cls, layout: PackedLayout, device: torch.device | str = "cpu", window: int | None = None
    ) -> "AttentionPlan":
        """One plan for each distinct window; layers that have the window share it.

        A window that no sequence outgrows is the same as none, and becomes None.
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
        device = _with_index(torch.device(device))
        if window is not None and window > int(layout.positions_T.max(initial=0)):
            window = None
        flash: CpuSchedule | VarlenSchedule | None = None
        if window is None and device.type == "cuda":
            flash = build_varlen_schedule(layout, device)
        elif window is None and device.type == "cpu":
            flash = build_cpu_schedule(layout)
        return cls(
            num_rows=layout.num_rows,
            device=device,
            window=window,
            positions_T=torch.tensor(layout.positions_T, device=device),
            expiry_T=torch.tensor(layout.expiry_T, device=device),
            row_blocks=build_row_blocks(layout, window),
            flash=flash,
        )


def _with_index(device: torch.device) -> torch.device:
    """`cuda` named as the device that tensors made there report, `cuda:0`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
