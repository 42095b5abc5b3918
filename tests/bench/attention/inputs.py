"""Cases, inputs and stand-ins for kernels that need a GPU."""

# Shape letters: T rows, U rows of a varlen call, N sequences, L tokens of the longest sequence, H heads (Hq query,
# Hkv key and value), D head dim.

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tests.attention.oracle import Case, dense_attention, dense_mask, make_case, output_and_gradients
from torch import Tensor
from torch.nn import functional

from ratoon.bench.attention.candidates import Candidate, Work
from ratoon.bench.attention.cases import AttentionCase
from ratoon.layout import PackedLayout


@dataclass(frozen=True)
class Drawn:
    """A forest that is a layout already."""

    drawn: PackedLayout

    def layout(self) -> PackedLayout:
        return self.drawn

    def shape(self) -> dict[str, Any]:
        return {"P": 0, "R": 0, "N": 0, "groups": 0}


def work_of(
    layout: PackedLayout,
    *,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    D: int = 8,
    dtype: torch.dtype = torch.float64,
) -> Work:
    case = AttentionCase(
        name="drawn", forest=Drawn(layout), H=heads[0], Hkv=heads[1], D=D, window=window, peers=(), needs_gpu=False
    )
    drawn = make_case(layout, heads=heads, head_dim=D).to(dtype)
    return Work(case=case, q_THD=drawn.q_THD, k_THD=drawn.k_THD, v_THD=drawn.v_THE, dout_THD=drawn.dout_THE)


def dense_answer(work: Work) -> list[Tensor]:
    """out, dq, dk, dv in float64, by autograd through a dense mask."""
    case = Case(
        q_THD=work.q_THD.double(),
        k_THD=work.k_THD.double(),
        v_THE=work.v_THD.double(),
        sinks_H=None,
        dout_THE=work.dout_THD.double(),
    )
    mask_TT = dense_mask(work.case.layout, work.case.window)
    return output_and_gradients(lambda case: dense_attention(case, mask_TT), case)


def answer_of(candidate: Candidate) -> list[Tensor]:
    """out, dq, dk, dv of the layout's rows."""
    out = candidate.forward()
    grads = torch.autograd.grad(out, candidate.leaves, candidate.check_dout)
    return [candidate.to_rows(out.detach()), *map(candidate.sum_to_rows, grads)]


def varlen_stand_in(
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
    """What FA2 and FA4 document of a causal varlen call: masks are aligned at each sequence's last token."""
    spans_q, spans_k = (list(pairwise(cu.tolist())) for cu in (cu_seqlens_q, cu_seqlens_k))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max(end - start for start, end in spans_q)
    assert max_seqlen_k == max(end - start for start, end in spans_k)
    assert spans_q[-1][1] == q_UHD.shape[0] and spans_k[-1][1] == k_UHD.shape[0] == v_UHD.shape[0]
    outs: list[Tensor] = []
    for (first_q, end_q), (first_k, end_k) in zip(spans_q, spans_k, strict=True):
        q, k, v = (
            x_THD.transpose(0, 1)[None] for x_THD in (q_UHD[first_q:end_q], k_UHD[first_k:end_k], v_UHD[first_k:end_k])
        )
        behind = torch.arange(end_q - first_q)[:, None] + (end_k - first_k) - (end_q - first_q)
        distance = behind - torch.arange(end_k - first_k)
        mask = (distance >= 0) & (distance < (end_k if window is None else window))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def padded_stand_in(q_NHLD: Tensor, k_NHLD: Tensor, v_NHLD: Tensor, softmax_scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q_NHLD, k_NHLD, v_NHLD, is_causal=True, scale=softmax_scale, enable_gqa=True
    )


def all_windows(layout: PackedLayout) -> list[int | None]:
    longest = int(layout.positions_T.max(initial=0)) + 1
    return [None, *(window for window in (1, 3, 7) if window <= longest)]
