"""Other people's ways of doing the same work: every prompt replicated, keys and values copied, or one masked call."""

# Shape letters: T rows, U rows after replication, N sequences, L tokens of the longest sequence, S segments,
# H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ratoon.bench.attention.candidates import Candidate, Work, as_leaves
from ratoon.bench.outcome import CannotRunError
from ratoon.layout import PackedLayout

PEERS = ("fa4", "fa2", "kv-copy-fa4", "flex-triton", "cudnn")

_TENSORS_OF_OUTPUT_SIZE = 9
"""Live at once in a replicated backward pass: q, out, their gradients, a float32 sum of dq (counts twice), gradients of
k and v for every query head, and the replicated keys and values."""


class VarlenKernel(Protocol):
    def __call__(
        self,
        q_UHD: Tensor,
        k_UHD: Tensor,
        v_UHD: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention of each sequence, aligned at its last token; differentiable. -> [U, Hq, D]."""
        ...


PaddedKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""q [N, Hq, L, D], k and v [N, Hkv, L, D], softmax scale -> [N, Hq, L, D]: causal, differentiable."""


def make_peer(name: str, work: Work) -> Candidate:
    """Raises CannotRunError where the peer is not installed, or has not what the case needs."""
    if work.device.type != "cuda":
        raise CannotRunError("needs a CUDA device")
    match name:
        case "fa2":
            return replicated_varlen(name, work, fa2_kernel)
        case "fa4":
            return replicated_varlen(name, work, load_fa4())
        case "kv-copy-fa4":
            return copied_keys(name, work, load_fa4())
        case "flex-triton":
            return masked_flex(name, work)
        case "cudnn":
            return replicated_padded(name, work, _cudnn)
    raise AssertionError(f"no such peer: {name}")


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows of the layout in another order, some of them several times."""

    row_U: Tensor
    """[U] int64. The row that each copy is of."""

    is_first_U: Tensor
    """[U] bool. The first copy of its row."""

    runs: tuple[tuple[int, int, int], ...]
    """(start, end, row): copies [start, end) are of consecutive rows from `row` on."""

    num_rows: int

    @classmethod
    def of(cls, row_U: np.ndarray, num_rows: int, device: torch.device) -> "Copies":
        is_first_U = np.zeros(row_U.size, bool)
        is_first_U[np.unique(row_U, return_index=True)[1]] = True
        assert is_first_U.sum() == num_rows, f"{is_first_U.sum()} of {num_rows} rows have a copy"
        edges = [0, *(np.flatnonzero(np.diff(row_U) != 1) + 1).tolist(), row_U.size]
        return cls(
            row_U=torch.from_numpy(row_U).to(device),
            is_first_U=torch.from_numpy(is_first_U).to(device),
            runs=tuple((start, end, int(row_U[start])) for start, end in pairwise(edges)),
            num_rows=num_rows,
        )

    def copy(self, tensor_THD: Tensor) -> Tensor:
        """[T, ...] -> [U, ...]."""
        return tensor_THD.index_select(0, self.row_U)

    def copy_once(self, tensor_THD: Tensor) -> Tensor:
        """[T, ...] -> [U, ...] with zeros in all copies of a row but the first."""
        return self.copy(tensor_THD).mul_(self.is_first_U[:, None, None])

    def first(self, tensor_UHD: Tensor) -> Tensor:
        """[U, ...] -> [T, ...]: each row as its first copy has it."""
        out_THD = tensor_UHD.new_empty(self.num_rows, *tensor_UHD.shape[1:])
        out_THD[self.row_U[self.is_first_U]] = tensor_UHD[self.is_first_U]
        return out_THD

    def sum(self, tensor_UHD: Tensor) -> Tensor:
        """[U, ...] -> [T, ...] float32 (float64 for float64). A run at a time, without atomics."""
        dtype = torch.promote_types(tensor_UHD.dtype, torch.float32)
        total_THD = tensor_UHD.new_zeros(self.num_rows, *tensor_UHD.shape[1:], dtype=dtype)
        for start, end, row in self.runs:
            total_THD[row : row + end - start].add_(tensor_UHD[start:end])
        return total_THD


def sequence_rows(layout: PackedLayout) -> list[np.ndarray]:
    """Each sequence's rows, as a stack without prompt sharing stores it."""
    return [rows for index in range(layout.num_sequences) if (rows := layout.sequence_rows(index)).size]


def replicated_varlen(name: str, work: Work, kernel: VarlenKernel) -> Candidate:
    """Every sequence whole, one after another: today's packed training. Replicating is not timed."""
    sequences = sequence_rows(work.case.layout)
    _require_memory(work, sum(rows.size for rows in sequences))
    copies = Copies.of(np.concatenate(sequences), work.case.layout.num_rows, work.device)
    cu_seqlens = cu_seqlens_of([rows.size for rows in sequences], work.device)
    longest = max(rows.size for rows in sequences)
    leaves = as_leaves(*(copies.copy(x) for x in (work.q_THD, work.k_THD, work.v_THD)))
    return Candidate(
        name=name,
        layout="replicated",
        is_peer=True,
        leaves=leaves,
        forward=lambda: kernel(*leaves, cu_seqlens, cu_seqlens, longest, longest, work.softmax_scale, work.case.window),
        dout=copies.copy(work.dout_THD),
        check_dout=copies.copy_once(work.dout_THD),
        to_rows=copies.first,
        sum_to_rows=copies.sum,
        details={},
    )


def replicated_padded(name: str, work: Work, kernel: PaddedKernel) -> Candidate:
    """A batch of all sequences, padded to the longest. Replicating is not timed."""
    if work.case.window is not None:
        raise CannotRunError("its batch is causal, without a window")
    sequences = sequence_rows(work.case.layout)
    L = max(rows.size for rows in sequences)
    _require_memory(work, len(sequences) * L)
    place = np.concatenate([index * L + np.arange(rows.size) for index, rows in enumerate(sequences)])
    place_U = torch.from_numpy(place).to(work.device)
    copies = Copies.of(np.concatenate(sequences), work.case.layout.num_rows, work.device)

    def pad(tensor_UHD: Tensor) -> Tensor:
        """[U, H, D] -> [N, H, L, D], zeros behind each sequence."""
        padded = tensor_UHD.new_zeros(len(sequences) * L, *tensor_UHD.shape[1:])
        padded[place_U] = tensor_UHD
        return padded.unflatten(0, (len(sequences), L)).transpose(1, 2).contiguous()

    def unpad(tensor_NHLD: Tensor) -> Tensor:
        return tensor_NHLD.transpose(1, 2).flatten(0, 1)[place_U]

    leaves = as_leaves(*(pad(copies.copy(x)) for x in (work.q_THD, work.k_THD, work.v_THD)))
    return Candidate(
        name=name,
        layout="replicated",
        is_peer=True,
        leaves=leaves,
        forward=lambda: kernel(*leaves, work.softmax_scale),
        dout=pad(copies.copy(work.dout_THD)),
        check_dout=pad(copies.copy_once(work.dout_THD)),
        to_rows=lambda out_NHLD: copies.first(unpad(out_NHLD)),
        sum_to_rows=lambda grad_NHLD: copies.sum(unpad(grad_NHLD)),
        details={},
    )


def copied_keys(name: str, work: Work, kernel: VarlenKernel) -> Candidate:
    """Queries once; each segment reads its own copy of the keys and values of its whole path.

    For a group that is the prompt once, and each response with its copy of [prompt, response]. The copies are
    made, and their gradients summed, inside the timed call.
    """
    layout = work.case.layout
    paths = segment_paths(layout)
    copies = Copies.of(np.concatenate(paths), layout.num_rows, work.device)
    lengths = np.diff(layout.segment_offsets).tolist()
    cu_seqlens_q = cu_seqlens_of(lengths, work.device)
    cu_seqlens_k = cu_seqlens_of([rows.size for rows in paths], work.device)
    max_seqlen_q, max_seqlen_k = max(lengths), max(rows.size for rows in paths)
    leaves = as_leaves(work.q_THD, work.k_THD, work.v_THD)

    def forward() -> Tensor:
        q_THD, k_THD, v_THD = leaves
        k_UHD, v_UHD = CopyRows.apply(k_THD, copies), CopyRows.apply(v_THD, copies)
        return kernel(
            *(q_THD, k_UHD, v_UHD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(work.softmax_scale, work.case.window),
        )

    return Candidate(
        name=name,
        layout="shared",
        is_peer=True,
        leaves=leaves,
        forward=forward,
        dout=work.dout_THD,
        check_dout=work.dout_THD,
        to_rows=lambda out_THD: out_THD,
        sum_to_rows=lambda grad_THD: grad_THD,
        details={"copied_key_rows": str(copies.row_U.numel())},
    )


def segment_paths(layout: PackedLayout) -> list[np.ndarray]:
    """For each segment, the rows from its root to its own last one."""
    offsets, parents = layout.segment_offsets.tolist(), layout.segment_parent.tolist()
    paths: list[np.ndarray] = []
    for segment, parent in enumerate(parents):
        own = np.arange(offsets[segment], offsets[segment + 1])
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
    return paths


class CopyRows(torch.autograd.Function):
    """Copies rows; the gradient sums copies in float32, because sums in bf16 lose what many copies add."""

    @staticmethod
    def forward(ctx: Any, tensor_THD: Tensor, copies: Copies) -> Tensor:
        ctx.copies, ctx.dtype = copies, tensor_THD.dtype
        return copies.copy(tensor_THD)

    @staticmethod
    def backward(ctx: Any, grad_UHD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.copies.sum(grad_UHD).to(ctx.dtype), None


def masked_flex(name: str, work: Work) -> Candidate:
    """FlexAttention as its documentation has it: a mask function, a block mask, the compiled op with its own tiles."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T = work.case.layout.num_rows
    # Compiled, it does not hold [T, T].
    block_mask = torch.compile(create_block_mask)(forest_mask_mod(work), None, None, T, T, device=str(work.device))
    # Whole or not at all: falling back to eager code would hold all scores.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    leaves = as_leaves(*(_heads_first(x) for x in (work.q_THD, work.k_THD, work.v_THD)))

    def forward() -> Tensor:
        out = compiled(
            *leaves,
            block_mask=block_mask,
            scale=work.softmax_scale,
            enable_gqa=True,
            kernel_options={"BACKEND": "TRITON"},
        )
        assert isinstance(out, Tensor), "flex_attention was asked for more than its output"
        return out

    return Candidate(
        name=name,
        layout="shared",
        is_peer=True,
        leaves=leaves,
        forward=forward,
        dout=_heads_first(work.dout_THD),
        check_dout=_heads_first(work.dout_THD),
        to_rows=lambda out_1HTD: out_1HTD[0].transpose(0, 1),
        sum_to_rows=lambda grad_1HTD: grad_1HTD[0].transpose(0, 1),
        details={},
    )


def forest_mask_mod(work: Work) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The forest's rule, and the window's, as FlexAttention asks for it."""
    layout, window = work.case.layout, work.case.window
    expiry_T = torch.tensor(layout.expiry_T, device=work.device)
    positions_T = torch.tensor(layout.positions_T, device=work.device)

    def reads(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row < expiry_T[key])

    if window is None:
        return reads

    def reads_near(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return reads(batch, head, row, key) & (positions_T[row] - positions_T[key] < window)

    return reads_near


def _heads_first(tensor_THD: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], contiguous."""
    return tensor_THD.transpose(0, 1)[None].contiguous()


def fa2_kernel(
    q_UHD: Tensor,
    k_UHD: Tensor,
    v_UHD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """torch's own FlashAttention-2, with autograd's own backward pass for it."""
    return torch.ops.aten._flash_attention_forward(
        *(q_UHD, k_UHD, v_UHD, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, True, False),
        scale=softmax_scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]


def load_fa4() -> VarlenKernel:
    """FlashAttention-4 from the package `flash-attn-4`."""
    try:
        flash_attn_varlen_func = import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError as error:
        raise CannotRunError(f"flash-attn-4 cannot be imported here: {error}") from error

    def fa4(
        q_UHD: Tensor,
        k_UHD: Tensor,
        v_UHD: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window: int | None,
    ) -> Tensor:
        return flash_attn_varlen_func(
            *(q_UHD, k_UHD, v_UHD),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )[0]

    return fa4


def _cudnn(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, softmax_scale: float) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(
            q_NHLD, k_NHLD, v_NHLD, is_causal=True, scale=softmax_scale, enable_gqa=True
        )


def cu_seqlens_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)


def _require_memory(work: Work, num_copied_rows: int) -> None:
    """Raises CannotRunError where the device has not the memory that so many rows need in a backward pass."""
    if work.device.type != "cuda":
        return
    needed = num_copied_rows * work.case.H * work.case.D * work.q_THD.element_size() * _TENSORS_OF_OUTPUT_SIZE
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(work.device)
    if needed > free:
        raise CannotRunError(
            f"{num_copied_rows:,} replicated rows need about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
        )
