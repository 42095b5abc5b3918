"""Eager stand-ins for torch's FlashAttention-2 varlen ops, so that the CUDA path runs on CPU tensors."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor

from ratoon.attention import AttentionPlan
from ratoon.attention.flash.schedule import build_cpu_schedule, build_varlen_schedule


def _probabilities(q: Tensor, k: Tensor, lse_HQ: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """probabilities [Hq, Q, K] under the given log-sum-exp (their own if None), and it."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    lse_HQ = scores.logsumexp(dim=2) if lse_HQ is None else lse_HQ
    return torch.exp(scores - lse_HQ[..., None]), lse_HQ


def _check_lengths(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    for x, cu, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == x.shape[0], "cu_seqlens must cover all rows"
        lengths = cu.diff()
        assert lengths.min() > 0 and lengths.max() == longest, "a run is empty or longer than announced"
        assert x.stride(-1) == 1, "the kernels want the head dim contiguous"
        assert x.shape[2] % 8 == 0, "the kernels want a head dim that is a multiple of 8"


@dataclass
class FakeVarlenKernels:
    num_calls: int = 0
    _state: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.zeros(2), torch.zeros(0)))

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale):
        _check_lengths(q, k, cu_q, cu_k, max_q, max_k)
        assert dropout == 0.0 and debug is False
        self.num_calls += 1
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], q.shape[0])
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            probs, lse[:, q0:q1] = _probabilities(q[q0:q1], k[k0:k1], None, is_causal, scale)
            out[q0:q1] = torch.einsum(
                "hqk,khd->qhd", probs, v[k0:k1].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            )
        return out, lse, *self._state, None

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng_state, unused, *, scale
    ):
        _check_lengths(q, k, cu_q, cu_k, max_q, max_k)
        assert dropout == 0.0 and lse.is_contiguous() and rng_state is self._state[0] and unused is self._state[1]
        self.num_calls += 1
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            rows, keys = slice(q0, q1), slice(k0, k1)
            probs, _ = _probabilities(q[rows], k[keys], lse[:, rows], is_causal, scale)
            dprobs = torch.einsum("qhd,khd->hqk", dout[rows], v[keys].repeat_interleave(group, dim=1))
            means = (dout[rows] * out[rows]).sum(dim=-1).T[..., None]
            dscores = probs * (dprobs - means) * scale
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, k[keys].repeat_interleave(group, dim=1))
            dk[keys] = torch.einsum("hqk,qhd->khd", dscores, q[rows]).unflatten(1, (-1, group)).sum(dim=2)
            dv[keys] = torch.einsum("hqk,qhd->khd", probs, dout[rows]).unflatten(1, (-1, group)).sum(dim=2)
        return dq, dk, dv

    def on_this_plan(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan with the schedule that a CUDA device would get."""
        return replace(plan, _schedules={(build_cpu_schedule,): build_varlen_schedule(plan)})

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            patch("ratoon.attention.flash.fa2._forward", self.forward),
            patch("ratoon.attention.flash.fa2._backward", self.backward),
        ):
            yield


fake_varlen_kernels = FakeVarlenKernels()
