"""One compiled graph for each kind of call, whatever the lengths."""

# Shape letters: T rows (whole tiles), H heads (Hq query, Hkv key and value), D head dim, E value head dim; 1 the batch.

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from ratoon.attention.flex.blocks import FlexBlocks
from ratoon.attention.kernel import Scoring

Backend = Literal["triton", "fa4"]

# Triton: every length is a multiple of the tile, which torch cannot see in a length that may change; told so, the
# kernels leave out the checks at the end of the rows. FlashAttention-4 looks for itself.
#
# ROWS_GUARANTEED_SAFE must stay off: it asks that a row read a key in the first tile it is given, not just in some.
_KERNEL_OPTIONS: dict[Backend, dict[str, Any]] = {
    "triton": {"BACKEND": "TRITON", "IS_DIVISIBLE": True},
    "fa4": {"BACKEND": "FLASH"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """All of a call that is compiled in. Two calls of one kind differ in lengths and in what the tensors hold."""

    backend: Backend
    scoring: Scoring

    has_window: bool
    has_sinks: bool

    row_tile: int
    key_tile: int

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    dtypes: tuple[torch.dtype, ...]
    """Of q, k, v and the sinks."""

    device: torch.device

    strides: tuple[tuple[int, ...], ...]
    """Of q, k and v."""

    wants_gradient: tuple[bool, ...]
    """Of q, k, v and the sinks."""


class CompiledCall:
    """Attention of one kind, compiled when it is first called.

    Dynamo counts the graphs of a code object, and after eight gives up compiling it: then attention would hold all
    T x T scores. It also turns a number that has changed into a symbol. So each kind has a code object of its own,
    under a name that only this kind has.
    """

    def __init__(self, kind: CallKind, compiler: str = "inductor") -> None:
        self.attend = _attend_of(kind)
        name = f"flex_{hashlib.sha256(repr(kind).encode()).hexdigest()[:16]}"
        self.attend.__code__ = self.attend.__code__.replace(co_name=name)
        # Inductor would time several ways to sum the sinks' gradient, and take another one in another run.
        options: dict[str, Any] | None = {"deterministic": True} if compiler == "inductor" else None
        self._compiled = torch.compile(self.attend, backend=compiler, fullgraph=True, options=options)

    def __call__(
        self, q_1HTD: Tensor, k_1HTD: Tensor, v_1HTE: Tensor, sinks_H: Tensor | None, blocks: FlexBlocks
    ) -> Tensor:
        """[1, Hq, T, E] in q's dtype. q: [1, Hq, T, D]. k: [1, Hkv, T, D]. v: [1, Hkv, T, E]."""
        for tensor in (q_1HTD, k_1HTD, v_1HTE):
            torch._dynamo.mark_dynamic(tensor, 2)
        return self._compiled(q_1HTD, k_1HTD, v_1HTE, sinks_H, *_tensors_of(blocks))


@cache
def compiled_call(kind: CallKind) -> CompiledCall:
    return CompiledCall(kind)


def _tensors_of(blocks: FlexBlocks) -> tuple[Tensor | None, ...]:
    """In the order in which the compiled function takes them."""
    lists = (blocks.partial_keys, blocks.full_keys, blocks.partial_rows, blocks.full_rows)
    return (
        *(tensor for each in lists for tensor in (each.num_11A, each.tiles_11AB)),
        blocks.expiry_T,
        blocks.positions_T,
        blocks.floor_T,
    )


def _attend_of(kind: CallKind) -> Any:
    """The function that is compiled. Tensors come in as arguments: what a mask closes over would be guarded."""
    scale, tiles, has_window = kind.scoring.softmax_scale, (kind.row_tile, kind.key_tile), kind.has_window
    score_mod = _softcap_of(kind.scoring.softcap)
    aux_request = AuxRequest(lse=True) if kind.has_sinks else None
    options = cast(FlexKernelOptions, _KERNEL_OPTIONS[kind.backend])

    def attend(
        q_1HTD: Tensor,
        k_1HTD: Tensor,
        v_1HTE: Tensor,
        sinks_H: Tensor | None,
        *mask_tensors: Tensor,
    ) -> Tensor:
        *tile_lists, expiry_T, positions_T, floor_T = mask_tensors

        def mask_mod(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            is_read = (key <= row) & (row < expiry_T[key])
            if has_window:
                is_read = is_read & (positions_T[key] > floor_T[row])
            return is_read

        T = q_1HTD.shape[2]
        block_mask = BlockMask((T, T), *tile_lists, BLOCK_SIZE=tiles, mask_mod=mask_mod)
        result: Any = flex_attention(  # a pair where there is a request
            q_1HTD,
            k_1HTD,
            v_1HTE,
            score_mod,
            block_mask,
            scale,
            enable_gqa=True,
            kernel_options=options,
            return_aux=aux_request,
        )
        if sinks_H is None:
            return result
        out_1HTE, aux = result
        # A sink is one more key of every row, whose value is zero.
        weight_1HT = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[:, None])
        return (out_1HTE * weight_1HT[..., None]).to(out_1HTE.dtype)

    return attend


def _softcap_of(softcap: float | None) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    if softcap is None:
        return None

    def score_mod(score: Tensor, _batch: Tensor, _head: Tensor, _row: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod
