"""What a forward and a backward kernel are: any pair of them can serve one call."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ratoon.attention.plan import AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a row weighs the keys that the plan lets it read."""

    softmax_scale: float
    """Multiplies q.k before softmax."""

    softcap: float | None = None
    """Scaled scores become softcap * tanh(score / softcap)."""


class ForwardKernel(Protocol):
    def __call__(
        self, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """-> out_THE in q's dtype, and lse_HT: fp32 (fp64 for fp64) log-sum-exp of the scores, sink included.

        Last dims are contiguous; other strides are anything. A row without keys has output 0.
        """
        ...


class BackwardKernel(Protocol):
    def __call__(
        self,
        dout_THE: Tensor,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THE: Tensor,
        out_THE: Tensor,
        lse_HT: Tensor,
        plan: AttentionPlan,
        scoring: Scoring,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """-> dq, dk, dv, each in its input's dtype, from what any forward kernel left.

        deterministic: bitwise equal in every run. The caller has asked only kernels that can.
        """
        ...
