"""Eager stand-ins for the ops that flash_attn_3 registers, so that the FA3 path runs on CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from tests.attention.flash.fake_runs import backward_runs, forward_runs, runs_of

from ratoon.attention.flash import fa3


@dataclass
class FakeFa3:
    """The order of the arguments is that of torch's own calls (torch/nn/attention/_fa3.py)."""

    num_calls: int = 0

    def fwd(
        self, q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, block_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk,
        softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    ):  # fmt: skip
        unused = (
            *(k_new, v_new, qv, out, cu_seqlens_k_new, block_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin),
            *(seqlens_rotary, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa),
        )
        assert all(x is None for x in unused)
        assert (window_size_left, window_size_right, attention_chunk, num_splits, sm_margin) == (-1, -1, 0, 1, 0)
        assert rotary_interleaved is True
        self.num_calls += 1
        starts, lengths = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
        runs = runs_of(q, k, starts, lengths, (max_seqlen_q, max_seqlen_k))
        out, lse = forward_runs(q, k, v, runs, causal, softmax_scale, softcap or None)
        return out, lse, torch.empty(0), torch.empty(0)

    def bwd(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left, window_size_right, softcap,
        deterministic, sm_margin,
    ):  # fmt: skip
        assert (window_size_left, window_size_right, sm_margin) == (-1, -1, 0) and isinstance(deterministic, bool)
        assert softmax_lse.is_contiguous() and all(x.is_contiguous() for x in (dq, dk, dv))
        self.num_calls += 1
        starts, lengths = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
        runs = runs_of(q, k, starts, lengths, (max_seqlen_q, max_seqlen_k))
        gradients = backward_runs(dout, q, k, v, out, softmax_lse, runs, causal, softmax_scale, softcap or None)
        for written, gradient in zip((dq, dk, dv), gradients, strict=True):
            written.copy_(gradient)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with patch.object(fa3, "_ops", lambda: self):
            yield
