"""The op that pairs a forward with a backward kernel: what it hands them, what it spares, what it keeps."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.attention.oracle import Case, assert_close, dense_attention, dense_mask, make_case, make_groups
from tests.attention.oracle import output_and_gradients as gradients_of
from torch import Tensor

from ratoon.attention import AttentionPlan, autograd, forest_attention, impls, reference, specs
from ratoon.attention.autograd import KernelPair
from ratoon.attention.choice_table import parse_choices
from ratoon.attention.flash import cpu
from ratoon.attention.impls import forget_choices
from ratoon.attention.kernel import Scoring

LAYOUT = make_groups((5, [3, 2]), (2, [4]))
CASE = make_case(LAYOUT, v_head_dim=4, has_sinks=True)
SCORING = Scoring(softmax_scale=0.4)


class SpiedPair:
    """Reference kernels that count their calls and keep what they were told."""

    def __init__(self) -> None:
        self.num_backward_calls = 0
        self.deterministic: list[bool] = []
        self.kernels = KernelPair(reference.forward, self.backward)

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backward_calls += 1
        self.deterministic.append(options["deterministic"])
        assert all(x.stride(-1) == 1 for x in args[:5])
        return reference.backward(*args, **options)

    def __call__(self, case: Case, deterministic: bool = False) -> Tensor:
        tensors = (case.q_THD, case.k_THD, case.v_THE, case.sinks_H)
        plan = AttentionPlan.build(LAYOUT)
        return autograd.attend(*tensors, plan, SCORING, self.kernels, deterministic=deterministic)


def exact(case: Case) -> Tensor:
    scaled = Case(case.q_THD, case.k_THD, case.v_THE, case.sinks_H, case.dout_THE, SCORING.softmax_scale)
    return dense_attention(scaled, dense_mask(LAYOUT))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_kernel_is_told_what_was_asked(deterministic: bool):
    pair = SpiedPair()
    gradients_of(lambda case: pair(case, deterministic), CASE)
    assert pair.deterministic == [deterministic]


@pytest.mark.parametrize("wanted", ["q_THD", "k_THD", "v_THE", "sinks_H"])
def test_one_gradient_alone_is_right_and_sinks_alone_need_no_kernel(wanted: str):
    """Frozen projections, and frozen models with trained sinks."""
    pair = SpiedPair()
    leaf = getattr(CASE, wanted).detach().clone().requires_grad_()
    inputs = {name: getattr(CASE, name) for name in ("q_THD", "k_THD", "v_THE", "sinks_H")} | {wanted: leaf}
    out_THE = pair(Case(**inputs, dout_THE=CASE.dout_THE))
    (gradient,) = torch.autograd.grad(out_THE, [leaf], CASE.dout_THE)
    index = ("q_THD", "k_THD", "v_THE", "sinks_H").index(wanted)
    assert_close([gradient], [gradients_of(exact, CASE)[1 + index]], 1e-10)
    assert pair.num_backward_calls == (wanted != "sinks_H")


def test_without_gradients_no_backward_kernel_is_kept():
    pair = SpiedPair()
    with torch.no_grad():
        out_THE = pair(CASE)
    assert out_THE.grad_fn is None and not out_THE.requires_grad


def test_the_graph_may_be_walked_twice_but_not_differentiated_twice():
    pair = SpiedPair()
    q_THD = CASE.q_THD.detach().clone().requires_grad_()
    out_THE = pair(Case(q_THD, CASE.k_THD, CASE.v_THE, None, CASE.dout_THE))
    first, second = (torch.autograd.grad(out_THE, [q_THD], CASE.dout_THE, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (dq_THD,) = torch.autograd.grad(out_THE.square().sum(), [q_THD], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq_THD.sum().backward()


def test_the_sinks_gradient_is_summed_chunk_by_chunk():
    """[T, H, E] is never held in the wider dtype."""
    seen: list[int] = []
    multiply = torch.Tensor.__mul__

    def spy(x: Tensor, y: Tensor) -> Tensor:
        if isinstance(y, Tensor) and y.ndim == 3:
            seen.append(x.shape[0])
        return multiply(x, y)

    tensors = (CASE.dout_THE, *_forward(CASE), CASE.sinks_H)
    whole = autograd.gradient_of_sinks(*tensors)  # pyright: ignore[reportArgumentType]
    with patch.object(autograd, "MAX_CHUNK_ELEMENTS", 3 * 4 * 4), patch.object(torch.Tensor, "__mul__", spy):
        chunked = autograd.gradient_of_sinks(*tensors)  # pyright: ignore[reportArgumentType]
    assert seen == [3, 3, 3, 3, 3, 1], "16 rows, 3 at a time"
    assert_close([chunked], [whole], 1e-12)


def _forward(case: Case) -> tuple[Tensor, Tensor]:
    plan = AttentionPlan.build(LAYOUT)
    return reference.forward(case.q_THD, case.k_THD, case.v_THE, case.sinks_H, plan, SCORING)


def test_bf16_sinks_have_their_gradient_from_fp32_sums():
    case = CASE.to(torch.bfloat16)
    pair = SpiedPair()
    ours = gradients_of(pair, case)[4]
    wanted = gradients_of(exact, case.to(torch.float64))[4]
    assert ours.dtype == torch.bfloat16
    # The output that the sum reads was rounded too.
    assert (ours.double() - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out, lse: (out[:, :1], lse), "the forward kernel returned (16, 1, 4)"),
        (lambda out, lse: (out.float(), lse), "of torch.float32"),
        (lambda out, lse: (out, lse.T), "a log-sum-exp (16, 4)"),
        (lambda out, lse: (out, lse.float()), "a log-sum-exp (4, 16) of torch.float32"),
    ],
)
def test_a_kernel_that_breaks_its_contract_is_caught(spoil: Callable[..., tuple[Tensor, Tensor]], message: str):
    def forward(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return spoil(*reference.forward(*args, **options))

    pair = SpiedPair()
    pair.kernels = KernelPair(forward, pair.backward)
    with pytest.raises(AssertionError) as caught:
        pair(CASE)
    assert message in str(caught.value)


def test_a_table_pairs_kernels_of_two_implementations(monkeypatch: pytest.MonkeyPatch):
    """forest_attention runs the forward of one and the backward of the other, and both say the same as either alone."""
    row = '[[cpu]]\nforward = "flash-cpu"\nbackward = "reference"\nmeasured = "for a test"\n'
    monkeypatch.setattr(impls, "choice_table", lambda: parse_choices(row))
    forget_choices()
    called: list[str] = []

    def spy(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **options: (called.append(name), kernel(*args, **options))[1]

    for module, home in ((cpu, "flash-cpu"), (reference, "reference")):
        for direction in ("forward", "backward"):
            monkeypatch.setattr(module, direction, spy(f"{home} {direction}", getattr(module, direction)))

    def attention(case: Case) -> Tensor:
        plan = AttentionPlan.build(LAYOUT)
        return forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, sinks_H=case.sinks_H, softmax_scale=0.4)

    try:
        got = gradients_of(attention, CASE)
    finally:
        forget_choices()
    assert called == ["flash-cpu forward", "reference backward"]
    assert_close(got, gradients_of(exact, CASE), 1e-10)


@pytest.mark.parametrize(("impl", "backend"), [("flex", "triton"), ("flex-triton", "triton"), ("flex-fa4", "fa4")])
def test_flexattention_gets_the_call_whole(monkeypatch: pytest.MonkeyPatch, impl: str, backend: str):
    """It is torch's own autograd, so no kernel pair is made."""
    from ratoon.attention.flex import attention as flex

    handed: list[tuple[object, ...]] = []

    def stand_in(*args, backend):
        handed.append((*args, backend, torch.is_autocast_enabled("cpu")))
        return args[0]

    monkeypatch.setattr(flex, "flex_attention", stand_in)
    monkeypatch.setattr(specs, "why_not_here", lambda name: None)
    monkeypatch.setattr(specs, "device_types_of", lambda spec: None)
    monkeypatch.setattr(impls, "device_types_of", lambda spec: None)
    forget_choices()
    plan, case = AttentionPlan.build(LAYOUT), make_case(LAYOUT).to(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out_THD = forest_attention(
                case.q_THD, case.k_THD, case.v_THE, plan, softcap=3.0, softmax_scale=0.4, impl=impl
            )
    finally:
        forget_choices()
    scoring = Scoring(softmax_scale=0.4, softcap=3.0)
    assert handed == [(case.q_THD, case.k_THD, case.v_THE, None, plan, scoring, backend, False)]
    assert out_THD is case.q_THD
