"""FlashAttention-4 (package flash-attn-4): forward in one launch over lists of tiles, backward in one launch a level.

One forward launch reads and writes every row once, and merges nothing. Levels serve the forward pass where no segment
has descendants (one level is one launch too, and asks no rule of any pair), and where there are no kernels that walk
lists. The backward kernels lose more by asking the rule than levels do by adding up. The levels' sums of dq
cannot share one buffer: it is laid out by tiles that start where runs do, and no two levels' runs start alike.
"""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

import torch
from torch import Tensor

from ratoon.attention.flash import fa4_shapes
from ratoon.attention.flash.block_lists import build_block_lists
from ratoon.attention.flash.levels import Levels, build_levels, has_descendants
from ratoon.attention.flash.merge import add_level, merge_level
from ratoon.attention.flash.padding import cut, kernel_ready
from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """See `ForwardKernel`. Head dims to 256."""
    by = forward_by_blocks if _is_for_blocks(q_THD, v_THE, plan) else forward_by_levels
    return by(q_THD, k_THD, v_THE, sinks_H, plan, scoring)


def forward_by_blocks(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """One launch."""
    from ratoon.attention.flash import fa4_package  # brings the package

    v_head_dim = v_THE.shape[2]
    dims = _head_dims(q_THD, v_THE)
    build = fa4_shapes.forward_build(*dims, _capability())
    lists = plan.schedule(build_block_lists, build.lists.rows, build.lists.keys)
    q_THD, k_THD, v_THE = _padded(q_THD, k_THD, v_THE, dims)
    out_THE, lse_HT = fa4_package.forward_blocks(q_THD, k_THD, v_THE, sinks_H, plan.expiry_T, lists, scoring, build)
    return cut(out_THE, v_head_dim), lse_HT


def forward_by_levels(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """One launch a level, then one pass that joins it to those before. Sinks count with each row's own segment."""
    from ratoon.attention.flash import fa4_package  # brings the package

    v_head_dim = v_THE.shape[2]
    levels = plan.schedule(build_levels)
    dims = _head_dims(q_THD, v_THE)
    q_THD, k_THD, v_THE = _padded(q_THD, k_THD, v_THE, dims)
    out_THE, lse_HT = fa4_package.forward_runs(q_THD, k_THD, v_THE, sinks_H, levels.own, scoring)
    if len(levels.ancestors) > 1:  # a row adds one part a level: its sum is rounded once
        out_THE = out_THE.to(lse_HT.dtype)
    for level in levels.ancestors:
        part_THE, part_lse_HT = fa4_package.forward_runs(q_THD, k_THD, v_THE, None, level, scoring)
        merge_level(out_THE, lse_HT, part_THE, part_lse_HT, level.reads_T)
    return cut(out_THE, v_head_dim).to(q_THD.dtype), lse_HT


def backward(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `BackwardKernel`. One launch a level.

    Deterministic where asked: the kernel's sums wait for their turn, and levels add in order. With the merged
    output and log-sum-exp, each level's kernel sees the probabilities of the whole row.
    """
    from ratoon.attention.flash import fa4_package  # brings the package

    head_dim, v_head_dim = q_THD.shape[2], v_THE.shape[2]
    dims = _backward_head_dims(q_THD, k_THD, v_THE)
    levels: Levels = plan.schedule(build_levels)
    q_THD, k_THD, v_THE = _padded(q_THD, k_THD, v_THE, dims)
    dout_THE, out_THE = kernel_ready(dout_THE, dims[1]), kernel_ready(out_THE, dims[1])
    tensors = (dout_THE, q_THD, k_THD, v_THE, out_THE, lse_HT.contiguous())
    dq_THD, dk_THD, dv_THE = fa4_package.backward_runs(*tensors, levels.own, scoring, deterministic=deterministic)
    if len(levels.ancestors) > 1:
        # A row adds one part a level; a key adds two parts at most, whatever the depth.
        dq_THD = dq_THD.to(lse_HT.dtype)
    for level in levels.ancestors:
        dq_part_THD, dk_part_THD, dv_part_THE = fa4_package.backward_runs(
            *tensors, level, scoring, deterministic=deterministic
        )
        add_level(dq_THD, dq_part_THD, level.reads_T)
        add_level(dk_THD, dk_part_THD, level.is_read_T)
        add_level(dv_THE, dv_part_THE, level.is_read_T)
    return cut(dq_THD, head_dim).to(q_THD.dtype), cut(dk_THD, head_dim), cut(dv_THE, v_head_dim)


def _is_for_blocks(q_THD: Tensor, v_THE: Tensor, plan: AttentionPlan) -> bool:
    """Where nothing is shared there is one level, which is the package's own packed causal attention."""
    return plan.schedule(has_descendants) and fa4_shapes.has_block_kernels(_head_dims(q_THD, v_THE)[0], _capability())


def _capability() -> int:
    return torch.cuda.get_device_capability()[0]


def _head_dims(q_THD: Tensor, v_THE: Tensor) -> tuple[int, int]:
    return fa4_shapes.head_dims(q_THD.shape[2], v_THE.shape[2], _capability())


def _backward_head_dims(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor) -> tuple[int, int]:
    """The backward kernels want one head dim where query heads share a key head."""
    shares_keys = q_THD.shape[1] != k_THD.shape[1]
    return fa4_shapes.backward_head_dims(*_head_dims(q_THD, v_THE), _capability(), one=shares_keys)


def _padded(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    return kernel_ready(q_THD, dims[0]), kernel_ready(k_THD, dims[0]), kernel_ready(v_THE, dims[1])
