"""The one file that knows flash-attn-4's names: private ones, of the versions that `providers.FA4_VERSIONS` lists.

Importing it brings the package, and with it CuTe's compiler.
"""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.
# pyright: reportMissingImports=false
# The package is installed only where its kernels run.

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from ratoon.attention.flash.block_lists import BlockLists
from ratoon.attention.flash.fa4_shapes import ForwardBuild
from ratoon.attention.flash.levels import Level, OwnRuns
from ratoon.attention.kernel import Scoring


@cute.jit
def row_reads_key(batch, head, row, key, seqlen_info, aux_tensors):
    """The forest's rule. aux_tensors: expiry_T."""
    expiry = aux_tensors[0][utils.ssa_to_scalar(key)]
    return (key <= row) & (row < utils.scalar_to_ssa(expiry, cutlass.Int32))


def forward_runs(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    runs: OwnRuns | Level,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """-> out [T, Hq, E] and natural log-sum-exp [Hq, T] fp32; rows outside the runs hold anything."""
    out_THE, lse_HT, *_ = _flash_attn_fwd(q_THD, k_THD, v_THE, **_runs(runs), **_forward_options(sinks_H, scoring))
    return out_THE, lse_HT


def forward_blocks(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    sinks_H: Tensor | None,
    expiry_T: Tensor,
    lists: BlockLists,
    scoring: Scoring,
    build: ForwardBuild,
) -> tuple[Tensor, Tensor]:
    """One launch: lists of each tile of rows. -> out [T, Hq, E], natural log-sum-exp [Hq, T] fp32."""
    out_1THE, lse_1HT, *_ = _flash_attn_fwd(
        q_THD[None],
        k_THD[None],
        v_THE[None],
        tile_mn=None if build.tile is None else (build.tile.rows, build.tile.keys),
        mma_pv_is_rs=build.probs_in_registers,
        **_blocks(expiry_T, lists),
        **_forward_options(sinks_H, scoring),
    )
    return out_1THE[0], lse_1HT[0]


def backward_runs(
    dout_THE: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    runs: OwnRuns | Level,
    scoring: Scoring,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv; rows and keys outside the runs hold anything."""
    gradients = _flash_attn_bwd(
        *(q_THD, k_THD, v_THE, out_THE, dout_THE, lse_HT),
        deterministic=deterministic,
        **_runs(runs),
        **_backward_options(scoring),
    )
    return gradients[0], gradients[1], gradients[2]


def _runs(runs: OwnRuns | Level) -> dict[str, Any]:
    if isinstance(runs, OwnRuns):
        return {
            "cu_seqlens_q": runs.offsets,
            "cu_seqlens_k": runs.offsets,
            "max_seqlen_q": runs.max_rows,
            "max_seqlen_k": runs.max_rows,
            "causal": True,
        }
    # A length beside its start makes the starts free: runs need not follow one another.
    return {
        "cu_seqlens_q": runs.query_starts,
        "cu_seqlens_k": runs.key_starts,
        "seqused_q": runs.num_queries,
        "seqused_k": runs.num_keys,
        "max_seqlen_q": runs.max_queries,
        "max_seqlen_k": runs.max_keys,
        "causal": False,
    }


def _blocks(expiry_T: Tensor, lists: BlockLists) -> dict[str, Any]:
    return {
        "mask_mod": row_reads_key,
        "aux_tensors": [expiry_T],
        "block_sparse_tensors": BlockSparseTensorsTorch(
            mask_block_cnt=lists.num_partial_11R,
            mask_block_idx=lists.partial_11RI,
            full_block_cnt=lists.num_full_11R,
            full_block_idx=lists.full_11RI,
            block_size=(lists.row_tile, lists.key_tile),
        ),
    }


def _forward_options(sinks_H: Tensor | None, scoring: Scoring) -> dict[str, Any]:
    if sinks_H is not None and sinks_H.dtype == torch.float64:
        sinks_H = sinks_H.float()
    return {
        "softmax_scale": scoring.softmax_scale,
        "score_mod": None if scoring.softcap is None else _cap(scoring.softcap)[0],
        "learnable_sink": sinks_H,
        "return_lse": True,
    }


def _backward_options(scoring: Scoring) -> dict[str, Any]:
    if scoring.softcap is None:
        return {"softmax_scale": scoring.softmax_scale}
    score_mod, score_mod_bwd = _cap(scoring.softcap)
    return {"softmax_scale": scoring.softmax_scale, "score_mod": score_mod, "score_mod_bwd": score_mod_bwd}


@cache
def _cap(softcap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Made once: the package reads a function's source to know whether it has compiled it."""
    return utils.create_softcap_scoremod(softcap), utils.create_softcap_scoremod_bwd(softcap)
