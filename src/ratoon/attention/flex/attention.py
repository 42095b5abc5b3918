"""Forest attention through torch's FlexAttention: one launch forward, torch's own autograd backward."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from typing import Literal

from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan

Backend = Literal["triton", "fa4"]


def flex_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    backend: Backend,
) -> Tensor:
    """[T, Hq, E] in q's dtype, differentiable in q, k, v and the sinks."""
    raise NotImplementedError
