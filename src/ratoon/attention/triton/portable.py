"""The launches of the portable kernels."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ratoon.attention.kernel import Scoring
from ratoon.attention.plan import AttentionPlan
from ratoon.attention.triton.backward import backward_kernel
from ratoon.attention.triton.blocks import Blocks
from ratoon.attention.triton.descriptors import aligned, padded_head_dim
from ratoon.attention.triton.forward import forward_kernel
from ratoon.attention.triton.schedule import KeySchedule, RowSchedule
from ratoon.attention.triton.scores import needs_upcast


def forward(
    q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, sinks_H: Tensor | None, out_THE: Tensor, lse_HT: Tensor,
    plan: AttentionPlan, scoring: Scoring, schedule: RowSchedule, blocks: Blocks,
) -> None:  # fmt: skip
    """Writes out and lse; the schedule has the blocks' tiles."""
    T, Hq, D = q_THD.shape
    rows, keys, num_tiles = blocks.forward_rows, blocks.forward_keys, schedule.tile_R.shape[0]
    forward_kernel[(num_tiles * Hq,)](
        _tiles(q_THD, rows), _tiles(k_THD, keys), _tiles(v_THE, keys), _tiles(out_THE, rows),
        sinks_H, lse_HT, plan.expiry_T, plan.positions_T,
        schedule.tile_R, *schedule.full, *schedule.partial,
        lse_HT.stride(0), T, num_tiles, scoring.softmax_scale, scoring.softcap, plan.window,
        GROUP=Hq // k_THD.shape[1], BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(v_THE.shape[2]),
        BLOCK_M=rows, BLOCK_N=keys,
        HAS_SINKS=sinks_H is not None, HAS_SOFTCAP=scoring.softcap is not None, HAS_WINDOW=plan.window is not None,
        LOOK_AHEAD=blocks.looks_ahead, UPCAST=needs_upcast(q_THD),
        num_warps=blocks.forward_warps, num_stages=blocks.forward_stages,
    )  # fmt: skip


def backward(
    dout_THE: Tensor, q_THD: Tensor, k_THD: Tensor, v_THE: Tensor, lse2_HT: Tensor, means_HT: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], parts: tuple[Tensor, Tensor], plan: AttentionPlan, scoring: Scoring,
    items: KeySchedule, rows: RowSchedule, blocks: Blocks,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, and the parts of dk and dv of split tiles."""
    T, Hq, D = q_THD.shape
    Hkv, E = v_THE.shape[1:]
    dq_THD, dk_THD, dv_THE = gradients
    num_items, num_tiles = items.tile_I.shape[0], rows.tile_R.shape[0]
    backward_kernel[(num_items * Hkv + num_tiles * Hq,)](
        *(_tiles(x, blocks.item_rows) for x in (q_THD, dout_THE)),
        *(_tiles(x, blocks.item_keys) for x in (k_THD, v_THE, dk_THD, dv_THE)),
        *(_tiles(x, blocks.rows) for x in (q_THD, dout_THE)), *(_tiles(x, blocks.keys) for x in (k_THD, v_THE)),
        _tiles(dq_THD, blocks.rows),
        lse2_HT, means_HT, *parts, plan.expiry_T, plan.positions_T,
        items.work_P, items.tile_I, items.slot_I, *items.full, *items.partial,
        rows.tile_R, *rows.full, *rows.partial,
        lse2_HT.stride(0), T, num_items, num_tiles, Hkv, scoring.softmax_scale, scoring.softcap, plan.window,
        GROUP=Hq // Hkv, D=D, E=E, BLOCK_D=padded_head_dim(D), BLOCK_E=padded_head_dim(E),
        ITEM_M=blocks.item_rows, ITEM_N=blocks.item_keys, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys,
        HAS_SOFTCAP=scoring.softcap is not None, HAS_WINDOW=plan.window is not None, UPCAST=needs_upcast(q_THD),
        num_warps=blocks.backward_warps, num_stages=blocks.backward_stages,
    )  # fmt: skip


def _tiles(tensor_THD: Tensor, num_rows: int) -> TensorDescriptor:
    """Tiles of `num_rows` rows of one head; what lies outside the tensor reads as zeros."""
    aligned_THD = aligned(tensor_THD)
    block = [num_rows, 1, padded_head_dim(tensor_THD.shape[2])]
    return TensorDescriptor(aligned_THD, list(tensor_THD.shape), list(aligned_THD.stride()), block)
