"""Rows that are only read: the others' output and every gradient are those of the whole, for what has queries."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.attention.oracle import Case, dense_mask, forests, make_case, make_groups
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.layout import PackedLayout

IMPLS = ("reference", "flash")


def gradients_of(case: Case, layout: PackedLayout, first: int, impl: str, window: int | None) -> tuple[Tensor, ...]:
    """The output of the rows from `first` on, and the gradients of their weighted sum."""
    plan = AttentionPlan.build(layout, case.q_THD.device, window, first_query_row=first)
    q = case.q_THD[first:].detach().requires_grad_()
    k, v = (x.detach().requires_grad_() for x in (case.k_THD, case.v_THE))
    sinks = None if case.sinks_H is None else case.sinks_H.detach().requires_grad_()
    out = forest_attention(q, k, v, plan, sinks_H=sinks, impl=impl)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    return out, *torch.autograd.grad((out * case.dout_THE[first:]).sum(), inputs)


def expected(case: Case, layout: PackedLayout, first: int, window: int | None) -> tuple[Tensor, ...]:
    """By the whole mask, with the loss of the rows that have queries."""
    inputs = [x.detach().requires_grad_() for x in (case.q_THD, case.k_THD, case.v_THE)]
    q, k, v = inputs
    sinks = None if case.sinks_H is None else case.sinks_H.detach().requires_grad_()
    group = q.shape[1] // k.shape[1]
    k_THD, v_THE = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k_THD) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~dense_mask(layout, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], dim=2)
    probs = scores.softmax(dim=2)[..., : q.shape[0]]
    out = torch.einsum("hts,she->the", probs, v_THE)[first:]
    all_inputs = [*inputs, *([] if sinks is None else [sinks])]
    dq, *others = torch.autograd.grad((out * case.dout_THE[first:]).sum(), all_inputs)
    return out, dq[first:], *others


@pytest.mark.parametrize("impl", IMPLS)
@given(forests, st.data())
def test_exact(impl: str, layout: PackedLayout, data: st.DataObject):
    first = data.draw(st.integers(0, layout.num_rows), label="first_query_row")
    window = data.draw(st.sampled_from([None, 3]), label="window") if impl == "reference" else None
    case = make_case(layout, heads=(4, 2), has_sinks=True)
    got, want = gradients_of(case, layout, first, impl, window), expected(case, layout, first, window)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "triton-adding", "flash-fa4", "flash-fa2", "flex-triton", "auto"])
@pytest.mark.parametrize("window", [None, 100])
def test_on_the_gpu(impl: str, window: int | None):
    """The borders of tiles of every kernel lie on all sides of these."""
    layout = make_groups((1000, [300, 1, 517, 64]), (5, [40]))
    case = make_case(layout, heads=(4, 2), head_dim=128)
    on_gpu = case.to(torch.bfloat16, "cuda")
    for first in (1, 64, 200, 531, 1000, layout.num_rows - 1):
        try:
            got = gradients_of(on_gpu, layout, first, impl, window)
        except ValueError as refusal:
            pytest.skip(str(refusal))
        for a, b in zip(got, expected(case, layout, first, window), strict=True):
            assert (a.double().cpu() - b).norm() < 0.02 * b.norm(), first


def test_wrong_numbers_are_refused():
    layout = make_groups((3, [2]))
    with pytest.raises(ValueError, match=r"first_query_row must be in \[0, 5\], got 6"):
        AttentionPlan.build(layout, first_query_row=6)
    case = make_case(layout)
    plan = AttentionPlan.build(layout, first_query_row=3)
    with pytest.raises(ValueError, match=r"q_THD has 5 rows, .* layout of 5, 2 of them with queries"):
        forest_attention(case.q_THD, case.k_THD, case.v_THE, plan)
