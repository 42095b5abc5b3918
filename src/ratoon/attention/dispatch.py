"""The op that models call."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import ParamSpec, cast

import torch
from torch import Tensor
from torch.nn import functional

from ratoon.attention.autograd import KernelPair, attend, without_autocast
from ratoon.attention.impls import ImplChoice, resolve_impl
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.request import AttentionRequest, Feature
from ratoon.attention.specs import spec_named

Params = ParamSpec("Params")


def _hidden_from_compiler(function: Callable[Params, Tensor]) -> Callable[Params, Tensor]:
    """torch.compile leaves the kernels alone: it knows no better ones, and traces a new graph for every plan."""
    return cast("Callable[Params, Tensor]", torch.compiler.disable(function))


@_hidden_from_compiler
def forest_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    deterministic: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Causal attention in which every row reads its own path through the forest, within the plan's window.

    q_THD: [T, Hq, D]. k_THD: [T, Hkv, D]; v_THD: [T, Hkv, E]; Hkv divides Hq. All of one dtype.
        Where the plan has a `first_query_row`, q and the output hold the rows from there on.
    softmax_scale: multiplies q.k before softmax, above 0; 1/sqrt(D) when None.
    softcap: scaled scores become softcap * tanh(score / softcap).
    sinks_H: [Hq], any floating dtype. One more score in every row's softmax, that brings no value; not capped.
    deterministic: the gradients are bitwise equal in every run, or the call is refused.
    impl: "auto" takes what choices.toml prefers of what can serve the call here (`resolve_impl` tells which
    kernels, forward and backward, and why); a name of `available_impls()` is obeyed or refused.

    Returns [T, Hq, E] in q's dtype. Scores and sums accumulate in fp32 (fp64 for fp64 input).
    Raises ValueError for shapes that do not fit, and for what the implementation cannot do.
    """
    _check(q_THD, k_THD, v_THD, plan, sinks_H)
    # Positive, because kernels take the largest q.k before they scale.
    scale = _positive("softmax_scale", softmax_scale, "1/sqrt(head dim)") or 1 / math.sqrt(q_THD.shape[2])
    scoring = Scoring(softmax_scale=scale, softcap=_positive("softcap", softcap, "no cap"))
    # Zeros stand for the queries that are not wanted: kernels know rows and keys by one number.
    q_THD = functional.pad(q_THD, (0, 0, 0, 0, plan.first_query_row, 0)) if plan.first_query_row else q_THD
    with on_device_of(plan):
        choice = choose_kernels(q_THD, v_THD, sinks_H, plan, scoring, deterministic=deterministic, impl=impl)
        if choice.impl == "flex":
            out_THD = _attend_by_flex(q_THD, k_THD, v_THD, sinks_H, plan, scoring, choice)
        else:
            kernels = load_kernels(choice)
            out_THD = attend(q_THD, k_THD, v_THD, sinks_H, plan, scoring, kernels, deterministic=deterministic)
    return out_THD[plan.first_query_row :] if plan.first_query_row else out_THD


def on_device_of(plan: AttentionPlan) -> AbstractContextManager[object]:
    """Kernels are chosen for the current device and launched there, whatever their arguments' is."""
    return torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()


def choose_kernels(
    q_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
    impl: str,
) -> ImplChoice:
    """What a call of `forest_attention` gets. Raises ValueError as `resolve_impl` does."""
    asked: dict[Feature, bool] = {
        "sliding window": plan.window is not None,
        "softcap": scoring.softcap is not None,
        "sinks": sinks_H is not None,
        "deterministic backward": deterministic,
    }
    request = AttentionRequest(
        device_type=q_THD.device.type,
        dtype=q_THD.dtype,
        head_dim=q_THD.shape[2],
        v_head_dim=v_THD.shape[2],
        features=frozenset(feature for feature, is_asked in asked.items() if is_asked),
        num_rows=plan.num_rows,
    )
    return resolve_impl(request, impl)


def load_kernels(choice: ImplChoice) -> KernelPair:
    """Imported at the first call that takes them: a kernel package may be absent, or slow to load."""
    assert choice.impl != "flex", "FlexAttention brings its own graph"
    forward, backward = (import_module(spec_named(name).home) for name in (choice.forward, choice.backward))
    return KernelPair(forward.forward, backward.backward)


def _attend_by_flex(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    plan: AttentionPlan,
    scoring: Scoring,
    choice: ImplChoice,
) -> Tensor:
    from ratoon.attention.flex.attention import flex_attention  # brings torch's compiler

    backend = "fa4" if choice.forward == "flex-fa4" else "triton"
    with without_autocast(plan.device):
        return flex_attention(q_THD, k_THD, v_THE, sinks_H, plan, scoring, backend=backend)


def _positive(name: str, value: object, without: str) -> float | None:
    """The number as Python's own, which all kernels take. In the range of fp32: they hold it in that."""
    if value is None:
        return None
    smallest, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not smallest <= number <= largest:
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}; pass None for {without}")
    return number


def _check(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: AttentionPlan, sinks_H: Tensor | None) -> None:
    """Shapes, dtypes and devices that fit one another and the plan."""
    if not isinstance(plan, AttentionPlan):
        raise ValueError(
            f"plan must be an AttentionPlan, got {type(plan).__name__}; build it with AttentionPlan.build(layout)"
        )
    tensors = {"q_THD": q_THD, "k_THD": k_THD, "v_THD": v_THD}
    for name, tensor in (tensors if sinks_H is None else tensors | {"sinks_H": sinks_H}).items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            raise ValueError(f"{name} must be [rows, heads, head dim], without a batch; got shape {_shape(tensor)}")
        num_rows = plan.num_query_rows if name == "q_THD" else plan.num_rows
        if tensor.shape[0] != num_rows:
            queries = f", {plan.num_query_rows} of them with queries" if plan.first_query_row else ""
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, but its plan was built for a layout of {plan.num_rows}{queries}; "
                "build the plan from the layout that the rows come from"
            )
        if tensor.dtype != q_THD.dtype or not tensor.is_floating_point():
            dtypes = ", ".join(f"{name} in {tensor.dtype}" for name, tensor in tensors.items())
            raise ValueError(f"q, k and v must have one floating dtype, got {dtypes}")
    for name, tensor in (tensors if sinks_H is None else tensors | {"sinks_H": sinks_H}).items():
        if tensor.device != plan.device:
            raise ValueError(f"{name} is on {tensor.device}, but its plan was built for {plan.device}")

    num_heads, num_kv_heads = q_THD.shape[1], k_THD.shape[1]
    if k_THD.shape[2] != q_THD.shape[2] or v_THD.shape[1] != num_kv_heads:
        raise ValueError(
            "k must have q's head dim, and v as many heads as k; "
            f"got q {_shape(q_THD)}, k {_shape(k_THD)}, v {_shape(v_THD)}"
        )
    if min(num_heads, num_kv_heads, q_THD.shape[2], v_THD.shape[2]) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "the number of key and value heads must divide the number of query heads, and no dim may be empty; "
            f"got q {_shape(q_THD)}, k {_shape(k_THD)}, v {_shape(v_THD)}"
        )
    if sinks_H is not None and (sinks_H.shape != (num_heads,) or not sinks_H.is_floating_point()):
        raise ValueError(
            f"sinks_H must hold one floating number for each of {num_heads} query heads, "
            f"got shape {_shape(sinks_H)} of {sinks_H.dtype}"
        )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
