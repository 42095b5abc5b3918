"""What a call asks of an implementation."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Feature = Literal["sliding window", "softcap", "sinks", "deterministic backward"]

FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    device_type: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    features: frozenset[Feature] = frozenset()

    num_rows: int | None = None
    """Rows of the layout. None where no layout is known yet: as if they were many."""

    @property
    def larger_head_dim(self) -> int:
        return max(self.head_dim, self.v_head_dim)
