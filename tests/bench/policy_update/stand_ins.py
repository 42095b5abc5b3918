"""Varlen kernels for a CPU: one that is right, and ones that are wrong in a way that real ones have been."""

# Shape letters: U rows of a varlen call, H heads, D head dim.

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from tests.bench.attention.inputs import varlen_stand_in
from torch import Tensor
from torch.nn import functional

from ratoon.bench.attention.peers import VarlenKernel
from ratoon.bench.policy_update.peer_attention import PeerKernel, Runs

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


def peer_kernel(varlen: VarlenKernel) -> PeerKernel:
    """`varlen` outside graphs; in them the right causal attention, its forward and backward apart."""
    return PeerKernel(differentiable=varlen, forward=_forward, backward=_backward)


def _forward(q_UHD: Tensor, k_UHD: Tensor, v_UHD: Tensor, runs: Runs, softmax_scale: float) -> tuple[Tensor, Tensor]:
    scores_HUU, _, v_HUD = _dense(q_UHD, k_UHD, v_UHD, runs, softmax_scale)
    lse_HU = scores_HUU.logsumexp(dim=2)
    return ((scores_HUU - lse_HU[:, :, None]).exp() @ v_HUD).transpose(0, 1), lse_HU


def _backward(
    dout_UHD: Tensor, q_UHD: Tensor, k_UHD: Tensor, v_UHD: Tensor, out_UHD: Tensor, lse_HU: Tensor, runs: Runs,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """From what forward left, as flash kernels do it."""
    scores_HUU, k_HUD, v_HUD = _dense(q_UHD, k_UHD, v_UHD, runs, softmax_scale)
    dout_HUD = dout_UHD.transpose(0, 1)
    probs_HUU = (scores_HUU - lse_HU[:, :, None]).exp()
    mean_HU1 = (dout_UHD * out_UHD).sum(dim=2).T[:, :, None]
    dscores_HUU = softmax_scale * probs_HUU * (dout_HUD @ v_HUD.mT - mean_HU1)
    gradients = dscores_HUU @ k_HUD, dscores_HUU.mT @ q_UHD.transpose(0, 1), probs_HUU.mT @ dout_HUD
    dq_HUD, dk_HUD, dv_HUD = gradients
    heads_of_a_key = q_UHD.shape[1] // k_UHD.shape[1]
    dk_UHD, dv_UHD = (x.unflatten(0, (-1, heads_of_a_key)).sum(dim=1).transpose(0, 1) for x in (dk_HUD, dv_HUD))
    return dq_HUD.transpose(0, 1), dk_UHD, dv_UHD


def _dense(q_UHD: Tensor, k_UHD: Tensor, v_UHD: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all queries and keys, -inf where the one does not read the other; k and v for each query head."""
    mask = torch.zeros(q_UHD.shape[0], k_UHD.shape[0], dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(*(pairwise(cu.tolist()) for cu in runs.arguments[:2]), strict=True):
        mask[q0:q1, k0:k1] = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
    repeats = q_UHD.shape[1] // k_UHD.shape[1]
    k_HUD, v_HUD = (x.transpose(0, 1).repeat_interleave(repeats, dim=0) for x in (k_UHD, v_UHD))
    return (scale * q_UHD.transpose(0, 1) @ k_HUD.mT).masked_fill(~mask, -torch.inf), k_HUD, v_HUD


WRONG: dict[str, Callable[..., Tensor]] = {
    "no boundaries": _one_sequence,
    "not causal": _masked(lambda own, key: torch.ones_like(own - key, dtype=torch.bool)),
    "first key unseen": _masked(lambda own, key: (key <= own) & ((key > 0) | (own == 0))),
    "own key unseen": _masked(lambda own, key: (key < own) | (own == 0) & (key == 0)),
    "aligned at the first token": _masked(lambda own, key: key <= own - own.min()),
}
