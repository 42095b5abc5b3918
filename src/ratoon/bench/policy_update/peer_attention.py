"""Attention of the peers: stock varlen kernels over runs of rows, also as one node of a compiled layer's graph.

The node is made as that of our own attention is (`ratoon.models.graph_attention`), so that neither side's layers are
split: opaque forward, opaque backward, and a number on the host in place of what a graph must not know.
"""

# Shape letters: T rows, U rows of keys after copying, H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ratoon.bench.attention.peers import Copies, CopyRows, VarlenKernel, fa2_kernel, load_fa4
from ratoon.bench.outcome import CannotRunError
from ratoon.bench.policy_update.variants import Impl


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of queries, each with a run of keys, aligned at their last tokens."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """In the order that varlen kernels take them."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k


ForwardKernel = Callable[[Tensor, Tensor, Tensor, Runs, float], tuple[Tensor, Tensor]]
"""q [T, Hq, D], k and v [U, Hkv, D], softmax scale -> out [T, Hq, D], log-sum-exp [Hq, T] float32 (float64 for
float64). Strides are free but for the last."""

BackwardKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Runs, float], tuple[Tensor, Tensor, Tensor]]
"""dout, q, k, v, out, log-sum-exp -> dq, dk, dv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKernel:
    """Causal attention of runs."""

    differentiable: VarlenKernel
    """As its users call it."""

    forward: ForwardKernel
    backward: BackwardKernel


def load_kernel(impl: Impl, device: torch.device) -> PeerKernel:
    """The attention kernel of a peer. Raises CannotRunError where it is not here."""
    if device.type != "cuda":
        raise CannotRunError("needs a CUDA device")
    if impl == "fa2":
        return PeerKernel(differentiable=fa2_kernel, forward=_fa2_forward, backward=_fa2_backward)
    return _load_fa4()


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerAttention:
    """What every layer of a peer does with its queries, keys and values."""

    kernel: PeerKernel
    runs: Runs

    key_copies: Copies | None = None
    """Where keys and values are copied for the runs that read them."""

    number: Tensor = field(init=False)
    """Stands for this object in compiled layers, as long as somebody has it. int64 on the host."""

    def __post_init__(self) -> None:
        number = next(_NUMBERS)
        _NUMBERED[number] = self
        object.__setattr__(self, "number", torch.tensor(number))

    def __call__(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, softmax_scale: float) -> Tensor:
        """-> [T, Hq, D]."""
        if torch.compiler.is_compiling():
            if self.key_copies is not None:
                row_U = self.key_copies.row_U
                k_THD, v_THD = (_copy_op(x, row_U, self.number) for x in (k_THD, v_THD))
            return _forward_op(q_THD, k_THD, v_THD, self.number, softmax_scale)[0]
        q_THD, k_THD, v_THD = (x.contiguous() for x in (q_THD, k_THD, v_THD))
        if self.key_copies is not None:
            k_THD, v_THD = (CopyRows.apply(x, self.key_copies) for x in (k_THD, v_THD))
        return self.kernel.differentiable(q_THD, k_THD, v_THD, *self.runs.arguments, softmax_scale, None)


_NUMBERED: WeakValueDictionary[int, PeerAttention] = WeakValueDictionary()
_NUMBERS = count()


def _numbered(number: Tensor) -> PeerAttention:
    attention = _NUMBERED.get(int(number))
    assert attention is not None, f"attention {int(number)} is gone, and a pass through a compiled layer needs it"
    return attention


def _fa2_forward(
    q_THD: Tensor, k_UHD: Tensor, v_UHD: Tensor, runs: Runs, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        *(q_THD, k_UHD, v_UHD, *runs.arguments, 0.0, True, False), scale=softmax_scale
    )
    return out_THD, lse_HT


def _fa2_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_UHD: Tensor,
    v_UHD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    runs: Runs,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The state of a dropout that is off; the kernel must be given it.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q_THD.device) for shape in ((2,), ()))
    return torch.ops.aten._flash_attention_backward(
        *(dout_THD, q_THD, k_UHD, v_UHD, out_THD, lse_HT, *runs.arguments, 0.0, True, seed, offset),
        scale=softmax_scale,
    )


def _load_fa4() -> PeerKernel:
    """With the two functions that the package's own autograd function calls, and what it gives them."""
    differentiable = load_fa4()
    interface = import_module("flash_attn.cute.interface")

    def options(runs: Runs, softmax_scale: float) -> dict[str, Any]:
        return {
            "cu_seqlens_q": runs.cu_seqlens_q,
            "cu_seqlens_k": runs.cu_seqlens_k,
            "max_seqlen_q": runs.max_seqlen_q,
            "max_seqlen_k": runs.max_seqlen_k,
            "softmax_scale": softmax_scale,
            "causal": True,
            "softcap": 0.0,
        }

    def forward(q_THD: Tensor, k_UHD: Tensor, v_UHD: Tensor, runs: Runs, softmax_scale: float) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = interface._flash_attn_fwd(
            q_THD, k_UHD, v_UHD, return_lse=True, **options(runs, softmax_scale)
        )
        return out_THD, lse_HT

    def backward(
        dout_THD: Tensor,
        q_THD: Tensor,
        k_UHD: Tensor,
        v_UHD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        runs: Runs,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_THD, dk_UHD, dv_UHD = interface._flash_attn_bwd(
            q_THD, k_UHD, v_UHD, out_THD, dout_THD, lse_HT, **options(runs, softmax_scale)
        )
        return dq_THD, dk_UHD, dv_UHD

    return PeerKernel(differentiable=differentiable, forward=forward, backward=backward)


@torch.library.custom_op(
    "ratoon_bench::attend_runs",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor number, float scale) -> (Tensor, Tensor)",
)
def _forward_op(
    q_THD: Tensor, k_UHD: Tensor, v_UHD: Tensor, number: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    attention = _numbered(number)
    q_THD, k_UHD, v_UHD = (_kernel_ready(x) for x in (q_THD, k_UHD, v_UHD))
    out_THD, lse_HT = attention.kernel.forward(q_THD, k_UHD, v_UHD, attention.runs, softmax_scale)
    assert lse_HT.shape == (q_THD.shape[1], q_THD.shape[0]), f"the kernel's log-sum-exp is {tuple(lse_HT.shape)}"
    return out_THD.contiguous(), lse_HT.contiguous()  # strides as the compiler was told


@_forward_op.register_fake
def _(q_THD: Tensor, k_UHD: Tensor, v_UHD: Tensor, number: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    T, Hq, D = q_THD.shape
    return q_THD.new_empty(T, Hq, D), q_THD.new_empty(Hq, T, dtype=torch.promote_types(q_THD.dtype, torch.float32))


@torch.library.custom_op(
    "ratoon_bench::attend_runs_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor number, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_UHD: Tensor,
    v_UHD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    number: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    attention = _numbered(number)
    dout_THD, q_THD, k_UHD, v_UHD = (_kernel_ready(x) for x in (dout_THD, q_THD, k_UHD, v_UHD))
    dq_THD, dk_UHD, dv_UHD = attention.kernel.backward(
        dout_THD, q_THD, k_UHD, v_UHD, out_THD, lse_HT, attention.runs, softmax_scale
    )
    return dq_THD.contiguous(), dk_UHD.contiguous(), dv_UHD.contiguous()


@_backward_op.register_fake
def _(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_UHD: Tensor,
    v_UHD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    number: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_UHD.new_empty(k_UHD.shape), v_UHD.new_empty(v_UHD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, softmax_scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.softmax_scale = softmax_scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout_THD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q_THD, k_UHD, v_UHD, number, out_THD, lse_HT = ctx.saved_tensors
    if dout_THD is None:
        return (None,) * 5
    gradients = _backward_op(dout_THD, q_THD, k_UHD, v_UHD, out_THD, lse_HT, number, ctx.softmax_scale)
    return *gradients, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op(
    "ratoon_bench::copy_rows", mutates_args=(), schema="(Tensor x, Tensor row, Tensor number) -> Tensor"
)
def _copy_op(x_THD: Tensor, row_U: Tensor, number: Tensor) -> Tensor:
    """-> [U, ...]. row_U is there for the compiler, which learns U from it."""
    return _copies(number).copy(x_THD)


@_copy_op.register_fake
def _(x_THD: Tensor, row_U: Tensor, number: Tensor) -> Tensor:
    return x_THD.new_empty(row_U.shape[0], *x_THD.shape[1:])


@torch.library.custom_op(
    "ratoon_bench::sum_copies", mutates_args=(), schema="(Tensor grad, Tensor number, SymInt rows) -> Tensor"
)
def _sum_op(grad_UHD: Tensor, number: Tensor, num_rows: int) -> Tensor:
    """-> [T, ...], as `CopyRows` has it."""
    return _copies(number).sum(grad_UHD).to(grad_UHD.dtype)


@_sum_op.register_fake
def _(grad_UHD: Tensor, number: Tensor, num_rows: int) -> Tensor:
    return grad_UHD.new_empty(num_rows, *grad_UHD.shape[1:])


def _save_number(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x_THD, _, number = inputs
    ctx.save_for_backward(number)
    ctx.num_rows = x_THD.shape[0]


def _sum_copies(ctx: Any, grad_UHD: Tensor) -> tuple[Tensor, None, None]:
    (number,) = ctx.saved_tensors
    return _sum_op(grad_UHD, number, ctx.num_rows), None, None


_copy_op.register_autograd(_sum_copies, setup_context=_save_number)


def _copies(number: Tensor) -> Copies:
    copies = _numbered(number).key_copies
    assert copies is not None, "copied keys without a list of copies"
    return copies


def _kernel_ready(tensor: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
