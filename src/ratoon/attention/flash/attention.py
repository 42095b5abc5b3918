"""Flash attention on the device at hand, for a dispatch that does not choose kernels yet."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from torch import Tensor

from ratoon.attention.autograd import KernelPair, attend
from ratoon.attention.flash import cpu, fa2
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan


def flash_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """[T, Hq, E] in q's dtype."""
    provider = cpu if plan.device.type == "cpu" else fa2
    kernels = KernelPair(provider.forward, provider.backward)
    scoring = Scoring(softmax_scale=softmax_scale)
    return attend(q_THD, k_THD, v_THE, sinks_H, plan, scoring, kernels, deterministic=False)
