"""What a row whose log-sum-exp is minus infinity does to others."""

import torch
from tests.attention.oracle import make_case
from torch import Tensor

from ratoon.attention import AttentionPlan, reference
from ratoon.attention.kernel import BackwardKernel, Scoring
from ratoon.layout import pack_documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_a_row_without_weights_stays_alone(backward: BackwardKernel, head_dim: int, *, deterministic: bool) -> None:
    """What it may not read has probabilities of 0, not NaN: gradients of another document keep their bits."""
    layout = pack_documents([[1] * 5, [1] * 60])
    case = make_case(layout, heads=(1, 1), head_dim=head_dim).to(torch.bfloat16, DEVICE)
    plan, scoring = AttentionPlan.build(layout, DEVICE), Scoring(softmax_scale=head_dim**-0.5)
    out_THE, lse_HT = reference.forward(case.q_THD, case.k_THD, case.v_THE, None, plan, scoring)

    def gradients(lse_HT: Tensor) -> tuple[Tensor, ...]:
        inputs = (case.dout_THE, case.q_THD, case.k_THD, case.v_THE, out_THE, lse_HT, plan, scoring)
        return backward(*inputs, deterministic=deterministic)

    others_lse_HT = lse_HT.clone()
    others_lse_HT[:, 3] = -torch.inf
    for grad, others_grad in zip(gradients(lse_HT), gradients(others_lse_HT), strict=True):
        assert torch.equal(others_grad[5:], grad[5:])
        assert not torch.equal(others_grad[:5], grad[:5])
