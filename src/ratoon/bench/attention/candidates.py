"""What is measured: a forward pass over leaves, and how its output and gradients map to the rows of the layout."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ratoon.attention import AttentionPlan, AttentionRequest, forest_attention, resolve_impl
from ratoon.bench.attention.cases import AttentionCase
from ratoon.bench.outcome import CannotRunError

GPU_IMPLS = ("auto", "flash-fa4", "triton-adding", "triton", "flex-fa4", "flash-fa3", "flash-fa2", "flex-triton")
CPU_IMPLS = ("auto", "flash-cpu", "reference")
OUR_IMPLS = (*GPU_IMPLS, "invariant", *(name for name in CPU_IMPLS if name not in GPU_IMPLS))
"""`invariant` is timed where it is named: nothing takes it for its speed."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One case's inputs on a device."""

    case: AttentionCase
    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    dout_THD: Tensor

    @property
    def device(self) -> torch.device:
        return self.q_THD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.q_THD.dtype

    @property
    def softmax_scale(self) -> float:
        return self.case.D**-0.5


def make_work(case: AttentionCase, device: torch.device) -> Work:
    """Seeded normal inputs: bf16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(
            case.layout.num_rows, num_heads, case.D, generator=generator, device=device, dtype=torch.float32
        ).to(dtype)

    return Work(case=case, q_THD=draw(case.H), k_THD=draw(case.Hkv), v_THD=draw(case.Hkv), dout_THD=draw(case.H))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way of doing a case's work."""

    name: str
    layout: Literal["shared", "replicated"]
    is_peer: bool

    leaves: tuple[Tensor, Tensor, Tensor]
    """q, k, v as this way of working stores them. They require gradients."""

    forward: Callable[[], Tensor]
    """From the leaves to the output, differentiable. All of it is timed, and so is all of its gradient."""

    dout: Tensor
    """The timed backward pass's gradient of the output, in the output's shape."""

    check_dout: Tensor
    """The same with each row's gradient once, so that the leaves' gradients add up to those of the shared rows."""

    to_rows: Callable[[Tensor], Tensor]
    """Output -> [T, Hq, D]."""

    sum_to_rows: Callable[[Tensor], Tensor]
    """Gradient of a leaf -> [T, heads, D]. Copies of a row are summed, in float32 at least."""

    details: dict[str, str]
    """More about it, for the result row."""


def make_ours(name: str, work: Work, plan: AttentionPlan) -> Candidate:
    """`forest_attention` under one of its implementations.

    Raises CannotRunError where the implementation refuses the case.
    """
    request = AttentionRequest(
        device_type=work.device.type,
        dtype=work.dtype,
        head_dim=work.case.D,
        v_head_dim=work.case.D,
        features=frozenset() if plan.window is None else frozenset({"sliding window"}),
        num_rows=plan.num_rows,
    )
    try:
        choice = resolve_impl(request, name)
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    leaves = as_leaves(work.q_THD, work.k_THD, work.v_THD)
    return Candidate(
        name=name,
        layout="shared",
        is_peer=False,
        leaves=leaves,
        forward=lambda: forest_attention(*leaves, plan, softmax_scale=work.softmax_scale, impl=name),
        dout=work.dout_THD,
        check_dout=work.dout_THD,
        to_rows=lambda out_THD: out_THD,
        sum_to_rows=lambda grad_THD: grad_THD,
        details={"kernels": choice.kernels},
    )


def as_leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves of their own, that share no gradient with what they were made from."""
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
