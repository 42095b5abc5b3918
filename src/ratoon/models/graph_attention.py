"""Attention over a forest as torch.compile sees it: an opaque node forward, one backward, and so one graph a layer.

A graph is compiled once and serves every forest, so the forest cannot be in it. A number on the host stands for it,
in a tensor: no guard looks into tensors.
"""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.attention import AttentionPlan
from ratoon.attention.autograd import KernelPair, gradient_of_sinks, run_backward, run_forward, sum_dtype
from ratoon.attention.dispatch import choose_kernels, load_kernels, on_device_of
from ratoon.attention.kernel import Scoring


class PlanSource(Protocol):
    """A forest, as far as this module needs one."""

    @property
    def impl(self) -> str: ...

    def plan_for(self, window: int | None) -> AttentionPlan: ...


_SOURCES: WeakValueDictionary[int, PlanSource] = WeakValueDictionary()
_NUMBERS = count()


def number_of(source: PlanSource) -> Tensor:
    """A new number for a forest, int64 on the host. It holds as long as somebody has the forest: see `held`."""
    number = next(_NUMBERS)
    _SOURCES[number] = source
    return torch.tensor(number)


def held(hidden_TC: Tensor, source: PlanSource) -> Tensor:
    """The same tensor; its graph keeps the forest for the layers that it leads back to."""
    return _Held.apply(hidden_TC, source)


def attend_in_graph(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    *,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> Tensor:
    """As `forest_attention` with the plan of that window and the forest's implementation, which must not be flex."""
    return _forward_op(q_THD, k_THD, v_THE, sinks_H, number, window, softmax_scale, softcap)[0]


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TC: Tensor, source: PlanSource) -> Tensor:
        ctx.source = source
        return hidden_TC.view_as(hidden_TC)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TC: Tensor
    ) -> tuple[Tensor, None]:
        return grad_TC, None


def _plan_and_kernels(
    q_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    window: int | None,
    scoring: Scoring,
) -> tuple[AttentionPlan, KernelPair]:
    source = _SOURCES.get(int(number))
    assert source is not None, f"forest {int(number)} is gone, and a pass through a compiled layer still needs it"
    plan = source.plan_for(window)
    with on_device_of(plan):
        choice = choose_kernels(q_THD, v_THE, sinks_H, plan, scoring, deterministic=False, impl=source.impl)
    return plan, load_kernels(choice)


@torch.library.custom_op(
    "ratoon::attend_forest",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor number, int? window, float scale, float? softcap)"
    " -> (Tensor, Tensor)",
)
def _forward_op(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scoring = Scoring(softmax_scale=softmax_scale, softcap=softcap)
    plan, kernels = _plan_and_kernels(q_THD, v_THE, sinks_H, number, window, scoring)
    with on_device_of(plan):
        out_THE, lse_HT = run_forward(q_THD, k_THD, v_THE, sinks_H, plan, scoring, kernels)
    return out_THE.contiguous(), lse_HT.contiguous()  # strides as the compiler was told


@_forward_op.register_fake
def _(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    T, Hq, _ = q_THD.shape
    return q_THD.new_empty(T, Hq, v_THE.shape[2]), q_THD.new_empty(Hq, T, dtype=sum_dtype(q_THD.dtype))


@torch.library.custom_op(
    "ratoon::attend_forest_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, Tensor number,"
    " int? window, float scale, float? softcap) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    out_THE: Tensor,
    lse_HT: Tensor,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsinks, which is empty without sinks."""
    scoring = Scoring(softmax_scale=softmax_scale, softcap=softcap)
    plan, kernels = _plan_and_kernels(q_THD, v_THE, sinks_H, number, window, scoring)
    with on_device_of(plan):
        gradients = run_backward(
            dout_THE, q_THD, k_THD, v_THE, out_THE, lse_HT, plan, scoring, kernels, deterministic=False
        )
        dsinks_H = q_THD.new_empty(0) if sinks_H is None else gradient_of_sinks(dout_THE, out_THE, lse_HT, sinks_H)
    dq_THD, dk_THD, dv_THE = (gradient.contiguous() for gradient in gradients)
    return dq_THD, dk_THD, dv_THE, dsinks_H


@_backward_op.register_fake
def _(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    out_THE: Tensor,
    lse_HT: Tensor,
    number: Tensor,
    window: int | None,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq_THD, dk_THD, dv_THE = (x.new_empty(x.shape) for x in (q_THD, k_THD, v_THE))
    return dq_THD, dk_THD, dv_THE, q_THD.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window, softmax_scale, softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = window, softmax_scale, softcap
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_THE: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q_THD, k_THD, v_THE, sinks_H, number, out_THE, lse_HT = ctx.saved_tensors
    if dout_THE is None:
        return (None,) * 8
    *gradients, dsinks_H = _backward_op(dout_THE, q_THD, k_THD, v_THE, sinks_H, out_THE, lse_HT, number, *ctx.settings)
    return *gradients, None if sinks_H is None else dsinks_H, None, None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)
