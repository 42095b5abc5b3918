"""Forest attention through torch's FlexAttention: one launch forward, and torch's own backward."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

import torch
from torch import Tensor
from torch.nn import functional

from ratoon.attention.flex.blocks import FlexBlocks, build_flex_blocks
from ratoon.attention.flex.compiled import Backend, CallKind, compiled_call
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan

MIN_HEAD_DIM = 16
FA4_HEAD_DIM_MULTIPLE = 32
"""By which its backward pass lays out the sums of dq on Hopper: between multiples dq came out wrong (4.0.0b36)."""


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
    """[T, Hq, E] in q's dtype, differentiable in q, k, v and the sinks.

    "triton": fp16, bf16 and fp32; head dims to 256, each of its own; all of the scoring. No atomics, forward or
    backward: the gradients are bitwise equal in every run.
    "fa4": fp16 and bf16; head dims to 128; no sinks, for its backward takes no gradient of the log-sum-exp; it sums
    dQ by atomics on Hopper.

    Backward runs once: torch's compiled graphs give their saved tensors' memory away, and refuse `retain_graph=True`
    unless `torch._functorch.config.donated_buffer` is off.
    """
    assert backend != "fa4" or sinks_H is None, "FlashAttention-4 under FlexAttention has no gradient for sinks"
    if plan.num_rows == 0:
        return _no_rows(q_THD, k_THD, v_THE, sinks_H)
    blocks = plan.schedule(build_flex_blocks, *_tiles(backend, plan.device))
    num_rows, v_head_dim = q_THD.shape[0], v_THE.shape[2]
    head_dim, padded_v_head_dim = _kernel_head_dims(q_THD.shape[2], v_head_dim, backend)
    q_THD, k_THD = (_padded(x, blocks.num_rows, head_dim) for x in (q_THD, k_THD))
    v_THE = _padded(v_THE, blocks.num_rows, padded_v_head_dim)
    call = compiled_call(_kind(q_THD, k_THD, v_THE, sinks_H, blocks, scoring, backend))
    q_1HTD, k_1HTD, v_1HTE = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THE))
    out_1HTE = call(q_1HTD, k_1HTD, v_1HTE, sinks_H, blocks)
    return out_1HTE[0].transpose(0, 1)[:num_rows, :, :v_head_dim]


def _tiles(backend: Backend, device: torch.device) -> tuple[int, int]:
    """Rows and keys of a tile: what the back end's own tiles divide, forward and backward."""
    if backend == "fa4" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        return 256, 128  # Blackwell's forward works on two tiles of 128 rows at a time
    return 128, 128


def _kernel_head_dims(head_dim: int, v_head_dim: int, backend: Backend) -> tuple[int, int]:
    """Zeros added to a head dim change no score and no other value."""
    head_dim, v_head_dim = max(head_dim, MIN_HEAD_DIM), max(v_head_dim, MIN_HEAD_DIM)
    if backend == "triton":
        return head_dim, v_head_dim
    largest = -(-max(head_dim, v_head_dim) // FA4_HEAD_DIM_MULTIPLE) * FA4_HEAD_DIM_MULTIPLE
    return largest, largest


def _padded(tensor_THD: Tensor, num_rows: int, head_dim: int) -> Tensor:
    """A copy, with zeros, where rows or head dim are short."""
    missing = (0, head_dim - tensor_THD.shape[2], 0, 0, 0, num_rows - tensor_THD.shape[0])
    if any(missing):
        return functional.pad(tensor_THD, missing)
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()


def _kind(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    blocks: FlexBlocks,
    scoring: Scoring,
    backend: Backend,
) -> CallKind:
    tensors = (q_THD, k_THD, v_THE) if sinks_H is None else (q_THD, k_THD, v_THE, sinks_H)
    return CallKind(
        backend=backend,
        scoring=scoring,
        has_window=blocks.floor_T is not None,
        has_sinks=sinks_H is not None,
        row_tile=blocks.row_tile,
        key_tile=blocks.key_tile,
        num_heads=q_THD.shape[1],
        num_kv_heads=k_THD.shape[1],
        head_dim=q_THD.shape[2],
        v_head_dim=v_THE.shape[2],
        dtypes=tuple(x.dtype for x in tensors),
        device=q_THD.device,
        strides=tuple(x.stride() for x in (q_THD, k_THD, v_THE)),
        wants_gradient=tuple(x.requires_grad and torch.is_grad_enabled() for x in tensors),
    )


def _no_rows(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None) -> Tensor:
    """[0, Hq, E], of which every input has a gradient."""
    inputs = (q_THD, k_THD, v_THE) if sinks_H is None else (q_THD, k_THD, v_THE, sinks_H)
    zero = torch.stack([x.sum().to(q_THD.dtype) for x in inputs]).sum() * 0
    return q_THD.new_empty(0, q_THD.shape[1], v_THE.shape[2]) + zero
