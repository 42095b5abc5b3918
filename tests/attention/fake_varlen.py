"""Eager stand-ins for torch's FlashAttention-2 varlen ops, so that the CUDA path runs on CPU tensors."""

# Shape letters: T rows, K keys of a level, H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ratoon.attention import AttentionPlan
from ratoon.attention.flash import cpu, fa2

POISON = torch.nan
"""In memory that a kernel does not write."""

_ON_CUDA = ("as on a CUDA device",)


def probabilities(q: Tensor, k: Tensor, lse_HQ: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """probabilities [Hq, Q, K] under the given log-sum-exp (their own if None), and it."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    lse_HQ = scores.logsumexp(dim=2) if lse_HQ is None else lse_HQ
    return torch.exp(scores - lse_HQ[..., None]), lse_HQ


def run_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HQ: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one run."""
    group = q.shape[1] // k.shape[1]
    probs, _ = probabilities(q, k, lse_HQ, is_causal, scale)
    dprobs = torch.einsum("qhd,khd->hqk", dout, v.repeat_interleave(group, dim=1))
    dscores = probs * (dprobs - (dout * out).sum(dim=-1).T[..., None]) * scale
    return (
        torch.einsum("hqk,khd->qhd", dscores, k.repeat_interleave(group, dim=1)),
        torch.einsum("hqk,qhd->khd", dscores, q).unflatten(1, (-1, group)).sum(dim=2),
        torch.einsum("hqk,qhd->khd", probs, dout).unflatten(1, (-1, group)).sum(dim=2),
    )


def poisoned_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, POISON, memory_format=torch.contiguous_format)


def _check(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
    """The runs' rows and keys."""
    for x, cu, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == x.shape[0], "the runs must cover all rows"
        assert cu.diff().min() >= 0 and isinstance(longest, int) and longest > 0, "a run ends before it starts"
        assert x.stride(-1) == 1, "the kernels want the head dim contiguous"
        assert x.shape[2] % 8 == 0, "the kernels want a head dim that is a multiple of 8"
    assert cu_q.numel() == cu_k.numel(), "as many runs of keys as of rows"
    runs = [
        (slice(q0, q1), slice(k0, k1))
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    ]
    assert all(keys.stop - keys.start <= max_k for _, keys in runs), "a run has more keys than announced"
    assert all(rows.stop - rows.start <= max_q for rows, keys in runs if keys.stop > keys.start), (
        "a run with keys has more rows than announced"
    )
    assert all(rows.stop > rows.start for rows, keys in runs if keys.stop > keys.start), (
        "a run of keys that no row reads"
    )
    return runs


@dataclass
class FakeVarlenKernels:
    """Memory that the kernels do not write is poison: rows past the announced longest run."""

    num_calls: int = 0

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale):
        runs = _check(q, k, cu_q, cu_k, max_q, max_k)
        assert dropout == 0.0 and debug is False
        self.num_calls += 1
        out, lse = poisoned_like(q), q.new_full((q.shape[1], q.shape[0]), POISON)
        for rows, keys in runs:
            if keys.stop == keys.start:
                rows = slice(rows.start, min(rows.stop, rows.start + max_q))
                out[rows], lse[:, rows] = 0, torch.inf
                continue
            probs, lse[:, rows] = probabilities(q[rows], k[keys], None, is_causal, scale)
            values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            out[rows] = torch.einsum("hqk,khd->qhd", probs, values)
        return out, lse, *_dropout_state(), None

    def backward(
        self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng_state, unused, *, scale
    ):
        runs = _check(q, k, cu_q, cu_k, max_q, max_k)
        assert dropout == 0.0 and lse.is_contiguous()
        for given, wanted in zip((rng_state, unused), _dropout_state(), strict=True):
            assert (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
        self.num_calls += 1
        dq, dk, dv = (poisoned_like(x) for x in (q, k, v))
        for rows, keys in runs:
            if keys.stop == keys.start:
                dq[rows.start : min(rows.stop, rows.start + max_q)] = 0
            else:
                dq[rows], dk[keys], dv[keys] = run_gradients(
                    dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], is_causal, scale
                )
        return dq, dk, dv

    def on_this_plan(self, plan: AttentionPlan) -> AttentionPlan:
        """The plan as on a CUDA device, for flash attention on CPU tensors while the stand-ins are installed."""
        return replace(plan, _schedules={_ON_CUDA: None})

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            patch.object(fa2, "_forward", self.forward),
            patch.object(fa2, "_backward", self.backward),
            patch.object(cpu, "forward", _by_plan(cpu.forward, fa2.forward)),
            patch.object(cpu, "backward", _by_plan(cpu.backward, fa2.backward)),
        ):
            yield


def _by_plan(on_cpu: Any, on_cuda: Any) -> Any:
    def kernel(*args: Any, **options: Any) -> Any:
        plan = next(arg for arg in args if isinstance(arg, AttentionPlan))
        return (on_cuda if _ON_CUDA in plan._schedules else on_cpu)(*args, **options)

    return kernel


def _dropout_state() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)


fake_varlen_kernels = FakeVarlenKernels()
