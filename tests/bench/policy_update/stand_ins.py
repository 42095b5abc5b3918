"""Varlen kernels for a CPU: one that is right, and ones that are wrong in a way that real ones have been."""

# Shape letters: U rows of a varlen call, H heads, D head dim.

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from tests.bench.attention.inputs import varlen_stand_in
from torch import Tensor
from torch.nn import functional

Masks = Callable[[Tensor, Tensor], Tensor]


def _masked(reads: Masks) -> Callable[..., Tensor]:
    """A varlen kernel whose rows read where `reads(row's key, key)`, both counted within a run of keys."""

    def kernel(
        q_UHD: Tensor, k_UHD: Tensor, v_UHD: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        outs: list[Tensor] = []
        for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
            own = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            mask = reads(own, torch.arange(k1 - k0)[None])
            q, k, v = (x.transpose(0, 1)[None] for x in (q_UHD[q0:q1], k_UHD[k0:k1], v_UHD[k0:k1]))
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    return kernel


def _one_sequence(q_UHD: Tensor, k_UHD: Tensor, v_UHD: Tensor, _: Tensor, __: Tensor, *others: Any) -> Tensor:
    """The boundaries are lost: responses read one another."""
    whole_q, whole_k = (torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q_UHD, k_UHD))
    lengths = q_UHD.shape[0], k_UHD.shape[0]
    return varlen_stand_in(q_UHD, k_UHD, v_UHD, whole_q, whole_k, *lengths, *others[2:])


WRONG: dict[str, Callable[..., Tensor]] = {
    "no boundaries": _one_sequence,
    "not causal": _masked(lambda own, key: torch.ones_like(own - key, dtype=torch.bool)),
    "first key unseen": _masked(lambda own, key: (key <= own) & ((key > 0) | (own == 0))),
    "own key unseen": _masked(lambda own, key: (key < own) | (own == 0) & (key == 0)),
    "aligned at the first token": _masked(lambda own, key: key <= own - own.min()),
}
