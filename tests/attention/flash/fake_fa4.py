"""Eager stand-ins for flash-attn-4's two functions, in place of the package: its path runs on CPU tensors."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tests.attention.fake_modules import replaced_modules
from tests.attention.flash.fake_runs import (
    attend_run,
    backward_runs,
    forward_runs,
    mask_of_tiles,
    runs_of,
)
from torch import Tensor

import ratoon.attention.flash
from ratoon.attention.flash import fa4

PACKAGE_FILE = "ratoon.attention.flash.fa4_package"


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None


@dataclass
class FakeFa4:
    calls: list[str] = field(default_factory=list)
    """What was launched, in order."""

    capability: int = 9

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float,
        causal: bool = False,
        learnable_sink: Tensor | None = None,
        tile_mn: tuple[int, int] | None = None,
        mma_pv_is_rs: bool | None = None,
        score_mod: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: BlockSparseTensorsTorch | None = None,
        return_lse: bool = False,
        aux_tensors: list[Tensor] | None = None,
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        _check_vectors(q, k, v)
        assert learnable_sink is None or learnable_sink.dtype != torch.float64
        options = (softmax_scale, None if score_mod is None else score_mod.softcap)
        if block_sparse_tensors is None:
            assert cu_seqlens_q is not None and cu_seqlens_k is not None and q.ndim == 3 and mask_mod is None
            assert tile_mn is None and mma_pv_is_rs is None, "packed runs are built as the package would"
            starts, lengths = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
            runs = runs_of(q, k, starts, lengths, (max_seqlen_q or 0, max_seqlen_k or 0))
            self.calls.append("own runs" if causal else "level")
            return *forward_runs(q, k, v, runs, causal, *options, learnable_sink), None, None, None
        assert q.ndim == 4 and q.shape[0] == 1 and not causal and cu_seqlens_q is None
        assert tile_mn is None or tile_mn == block_sparse_tensors.block_size, "an entry stands for one tile"
        self.calls.append("blocks")
        mask = _mask(q.shape[1], block_sparse_tensors, mask_mod, aux_tensors)
        out, lse = attend_run(q[0], k[0], v[0], mask, *options, learnable_sink)
        return out[None], lse[None], None, None, None

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float,
        causal: bool = False,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
    ) -> tuple[Tensor, ...]:
        _check_vectors(q, k, v, out, dout)
        assert lse.is_contiguous() and lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1], "GQA backward requires one head dim"
        assert (score_mod is None) == (score_mod_bwd is None)
        options = (softmax_scale, None if score_mod is None else score_mod.softcap)
        assert q.shape[-1] % 32 == v.shape[-1] % 32 == 0 or self.capability != 9, "dq is wrong at other head dims"
        assert cu_seqlens_q is not None and cu_seqlens_k is not None and q.ndim == 3
        starts, lengths = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
        runs = runs_of(q, k, starts, lengths, (max_seqlen_q or 0, max_seqlen_k or 0))
        self.calls.append("own runs" if causal else "level")
        return backward_runs(dout, q, k, v, out, lse, runs, causal, *options)

    @contextmanager
    def installed(self, capability: int = 9) -> Iterator[None]:
        """flash-attn-4 is there, on a GPU of that major compute capability."""
        self.capability = capability
        modules = {name: ModuleType(name) for name in ("cutlass", "cutlass.cute", "flash_attn", "flash_attn.cute")}
        utils, sparsity, interface = (ModuleType(f"flash_attn.cute.{name}") for name in _SUBMODULES)
        cutlass, cute = modules["cutlass"], modules["cutlass.cute"]
        _set(cutlass, cute=cute, Int32=torch.int32)
        _set(cute, jit=lambda function: function)
        _set(utils, ssa_to_scalar=lambda value: value, scalar_to_ssa=lambda value, dtype: value)
        _set(utils, create_softcap_scoremod=_ScoreMod, create_softcap_scoremod_bwd=_ScoreMod)
        _set(sparsity, BlockSparseTensorsTorch=BlockSparseTensorsTorch)
        _set(interface, _flash_attn_fwd=self.forward, _flash_attn_bwd=self.backward)
        _set(modules["flash_attn.cute"], utils=utils, block_sparsity=sparsity, interface=interface)
        modules |= {module.__name__: module for module in (utils, sparsity, interface)}
        with (
            replaced_modules(modules, dropped=(PACKAGE_FILE,)),
            patch.object(fa4, "_capability", lambda: capability),
        ):
            package_file = importlib.import_module(PACKAGE_FILE)
            with patch.object(ratoon.attention.flash, "fa4_package", package_file, create=True):
                yield


_SUBMODULES = ("utils", "block_sparsity", "interface")


@dataclass(frozen=True)
class _ScoreMod:
    softcap: float


def _set(module: ModuleType, **names: Any) -> None:
    module.__dict__.update(names)


def _check_vectors(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0, "a head dim that the kernels have not"
        strides = [stride * x.element_size() for stride in x.stride()[-3:-1]]
        assert all(stride % 16 == 0 and stride for stride in strides) and x.data_ptr() % 16 == 0, "vectors not aligned"


def _mask(num_rows: int, lists: BlockSparseTensorsTorch, mask_mod: Any, aux_tensors: list[Tensor] | None) -> Tensor:
    assert lists.block_size is not None and lists.full_block_cnt is not None and lists.full_block_idx is not None
    return mask_of_tiles(
        num_rows,
        lists.block_size,
        [(lists.mask_block_cnt, lists.mask_block_idx, False), (lists.full_block_cnt, lists.full_block_idx, True)],
        lambda rows, keys: mask_mod(0, 0, rows, keys, None, aux_tensors),
    )
