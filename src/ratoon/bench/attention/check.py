"""Whether a candidate computes the case's attention: its output and gradients against float64, path by path."""

# Shape letters: T rows, B query rows of a block, K keys of a path, H heads (Hq query, Hkv key and value), J checked key
# heads, G query heads of one key head, D head dim.

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratoon.bench.attention.candidates import Candidate, Work
from ratoon.bench.outcome import WrongResultError
from ratoon.layout import PackedLayout

TENSORS = ("out", "dq", "dk", "dv")

_CHECK_FLOPS = 3e13
"""At most this much float64 work a case, in whole key heads, and two heads at least: a second or two on an H200."""

_BLOCK_SCORES = 2**26
"""Scores held at once."""

_ERROR_FACTOR = 2.0
_ROUNDING_BAND = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
"""Of a tensor's largest entry. One rounding; in float32 what vectorised exponentials are out by as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one candidate."""

    max_error: float
    """Largest error over the largest entry, of the worst of out, dq, dk, dv."""

    rms_error: float
    """RMS error over RMS, of the worst of the four."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A case's output and gradients for the checked heads, and how far plain attention in its dtype is from them."""

    kv_heads: list[int]
    exact: list[Tensor]
    """[T, J, G or 1, D] float64 for each of `TENSORS`."""

    allowed_max: list[float]
    """Largest error of each tensor that passes."""

    allowed_rms: list[float]

    eager: Errors
    """Of attention in the case's dtype: what the budget is made of."""


def expect(work: Work) -> Expected:
    """The exact answer and the error budget.

    The budget is twice the error of attention that accumulates in float32 and rounds to the case's dtype where flash
    kernels do (probabilities, score gradients, results), and one rounding of the largest entry for the maximum.
    """
    kv_heads = _checked_heads(work)
    exact = _attend(work, kv_heads, torch.float64, rounds_to=torch.float64)
    eager = [x.double() for x in _attend(work, kv_heads, torch.float32, rounds_to=work.dtype)]
    scales = [x.abs().max().item() for x in exact]
    max_errors = [_max(x - y) for x, y in zip(eager, exact, strict=True)]
    rms_errors = [_rms(x - y) for x, y in zip(eager, exact, strict=True)]
    band = _ROUNDING_BAND[work.dtype]
    return Expected(
        kv_heads=kv_heads,
        exact=exact,
        allowed_max=[_ERROR_FACTOR * x + band * scale for x, scale in zip(max_errors, scales, strict=True)],
        allowed_rms=[_ERROR_FACTOR * x + band / 8 * _rms(y) for x, y in zip(rms_errors, exact, strict=True)],
        eager=_relative(exact, max_errors, rms_errors),
    )


def check(candidate: Candidate, work: Work, expected: Expected) -> Errors:
    """Runs the candidate forward and backward once. Returns its relative errors.

    Raises WrongResultError where a tensor is over its budget or not finite, in the checked heads.
    """
    raw_out = candidate.forward()
    raw_grads = torch.autograd.grad(raw_out, candidate.leaves, candidate.check_dout)
    tensors = [candidate.to_rows(raw_out.detach()), *(candidate.sum_to_rows(grad) for grad in raw_grads)]
    max_errors: list[float] = []
    rms_errors: list[float] = []
    wrong: list[str] = []
    for name, tensor_THD, exact, allowed_max, allowed_rms in zip(
        TENSORS, tensors, expected.exact, expected.allowed_max, expected.allowed_rms, strict=True
    ):
        difference = _of_heads(tensor_THD, expected.kv_heads, work.case.Hkv).double() - exact
        max_errors.append(_max(difference))
        rms_errors.append(_rms(difference))
        if not tensor_THD.isfinite().all():  # all heads, checked or not
            wrong.append(f"{name} is not finite everywhere")
        elif max_errors[-1] > allowed_max or rms_errors[-1] > allowed_rms:
            wrong.append(
                f"{name}: largest error {max_errors[-1]:.3g} (allowed {allowed_max:.3g}), "
                f"RMS {rms_errors[-1]:.3g} (allowed {allowed_rms:.3g})"
            )
    if wrong:
        raise WrongResultError("; ".join(wrong))
    return _relative(expected.exact, max_errors, rms_errors)


def _checked_heads(work: Work) -> list[int]:
    """All key heads, or as many as the work allows, spread from the first to the last; their query heads with them."""
    case = work.case
    of_one_head = (case.forward_flops + case.backward_flops) / case.Hkv
    count = min(case.Hkv, max(2, int(_CHECK_FLOPS / of_one_head)))
    return np.unique(np.linspace(0, case.Hkv - 1, count).round().astype(int)).tolist()


def _of_heads(tensor_THD: Tensor, kv_heads: list[int], num_kv_heads: int) -> Tensor:
    """[T, heads, D] -> [T, J, G, D]; G is 1 for keys and values."""
    T, _, D = tensor_THD.shape
    return tensor_THD.reshape(T, num_kv_heads, -1, D)[:, kv_heads]


def _attend(work: Work, kv_heads: list[int], dtype: torch.dtype, *, rounds_to: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of the checked heads, accumulated in `dtype`.

    Rows read their own path, walked from segment to parent: nothing here knows of expiry, levels or tiles.
    """

    def take(tensor_THD: Tensor) -> Tensor:
        """[J, G, T, D]."""
        return _of_heads(tensor_THD, kv_heads, work.case.Hkv).to(dtype).permute(1, 2, 0, 3).contiguous()

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(rounds_to).to(dtype)

    q_JGTD, k_JGTD, v_JGTD, dout_JGTD = map(take, (work.q_THD, work.k_THD, work.v_THD, work.dout_THD))
    out_JGTD, dq_JGTD = torch.zeros_like(q_JGTD), torch.zeros_like(q_JGTD)
    dk_JGTD, dv_JGTD = torch.zeros_like(k_JGTD), torch.zeros_like(v_JGTD)
    num_heads = q_JGTD.shape[0] * q_JGTD.shape[1]
    for block in _blocks(work.case.layout, work.case.window, max_scores=_BLOCK_SCORES // num_heads):
        rows = slice(block.start, block.end)
        key_rows = torch.from_numpy(block.key_rows).to(work.device)
        mask_BK = _mask(block, work.case.window, work.device)
        q, dout = q_JGTD[:, :, rows], dout_JGTD[:, :, rows]
        k, v = k_JGTD[:, :, key_rows], v_JGTD[:, :, key_rows]
        scores_JGBK = (q @ k.transpose(2, 3) * work.softmax_scale).masked_fill_(~mask_BK, -torch.inf)
        p_JGBK = scores_JGBK.softmax(dim=-1)
        p_rounded = rounded(p_JGBK)
        out = rounded(p_rounded @ v)
        out_JGTD[:, :, rows] = out
        mean_JGB1 = (out * dout).sum(dim=-1, keepdim=True)
        ds_JGBK = rounded(p_JGBK * (dout @ v.transpose(2, 3) - mean_JGB1))
        dq_JGTD[:, :, rows] = ds_JGBK @ k * work.softmax_scale
        # Keys are read by all query heads of their own.
        dk_JGTD.index_add_(2, key_rows, (ds_JGBK.transpose(2, 3) @ q).sum(dim=1, keepdim=True) * work.softmax_scale)
        dv_JGTD.index_add_(2, key_rows, (p_rounded.transpose(2, 3) @ dout).sum(dim=1, keepdim=True))
    return [rounded(x_JGTD).permute(2, 0, 1, 3) for x_JGTD in (out_JGTD, dq_JGTD, dk_JGTD, dv_JGTD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Consecutive rows of one segment, and the part of their path that any of them reads."""

    start: int
    end: int
    first_position: int
    """Of row `start`."""

    key_rows: np.ndarray
    """[K] int64, in position order."""

    first_key_position: int


def _blocks(layout: PackedLayout, window: int | None, *, max_scores: int) -> Iterator[_Block]:
    offsets, parents = layout.segment_offsets.tolist(), layout.segment_parent.tolist()
    paths: list[np.ndarray] = []
    for segment, parent in enumerate(parents):
        before = paths[parent] if parent >= 0 else np.empty(0, np.int64)
        path = np.concatenate([before, np.arange(offsets[segment], offsets[segment + 1])])
        paths.append(path)
        num_rows = max(1, max_scores // path.size)
        for start in range(offsets[segment], offsets[segment + 1], num_rows):
            end = min(start + num_rows, offsets[segment + 1])
            position = before.size + start - offsets[segment]
            first_key = 0 if window is None else max(0, position - window + 1)
            yield _Block(
                start=start,
                end=end,
                first_position=position,
                key_rows=path[first_key : position + end - start],
                first_key_position=first_key,
            )


def _mask(block: _Block, window: int | None, device: torch.device) -> Tensor:
    """[B, K] bool: keys up to the row's own position, and no further back than the window."""
    num_rows, num_keys = block.end - block.start, block.key_rows.size
    position_B1 = torch.arange(num_rows, device=device)[:, None] + block.first_position
    key_position_K = torch.arange(num_keys, device=device) + block.first_key_position
    mask_BK = key_position_K <= position_B1
    return mask_BK if window is None else mask_BK & (key_position_K > position_B1 - window)


def _max(difference: Tensor) -> float:
    return difference.abs().max().item()


def _rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


def _relative(exact: list[Tensor], max_errors: list[float], rms_errors: list[float]) -> Errors:
    return Errors(
        max_error=max(error / _max(x) for error, x in zip(max_errors, exact, strict=True)),
        rms_error=max(error / _rms(x) for error, x in zip(rms_errors, exact, strict=True)),
    )
