"""Eager runs and tiles, for the stand-ins of FA3 and FA4. Memory that the kernels do not write is poison."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.attention.fake_varlen import poisoned_like
from torch import Tensor


@dataclass
class Run:
    rows: slice
    keys: slice


def runs_of(
    q: Tensor,
    k: Tensor,
    starts: tuple[Tensor, Tensor],
    lengths: tuple[Tensor | None, Tensor | None],
    longest: tuple[int, int],
) -> list[Run]:
    """As kernels that take a start and a length for each run find them; without lengths, from start to start."""
    sides: list[list[slice]] = []
    for x, start, length, max_length in zip((q, k), starts, lengths, longest, strict=True):
        assert start.dtype == torch.int32 and start.is_contiguous() and isinstance(max_length, int)
        if length is None:
            length = start.diff()
        else:
            assert length.shape == (start.numel() - 1,) and length.dtype == torch.int32 and length.is_contiguous()
        ends = start[:-1] + length
        assert length.min() > 0, "a run is empty"
        assert length.max() == max_length, "the longest run is not as announced"
        assert start.min() >= 0 and ends.max() <= x.shape[0], "a run leaves the rows"
        assert (start[1:-1] >= ends[:-1]).all(), "runs overlap: their gradients would be lost"
        sides.append([slice(a, b) for a, b in zip(start.tolist(), ends.tolist(), strict=False)])
    return [Run(rows, keys) for rows, keys in zip(*sides, strict=True)]


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def attend_run(
    q: Tensor, k: Tensor, v: Tensor, mask_QK: Tensor, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """-> out [Q, Hq, E], log-sum-exp [Hq, Q]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * scale
    scores = capped(scores, softcap).masked_fill(~mask_QK, -torch.inf)
    lse = scores.logsumexp(dim=2)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.to(lse.dtype)[:, None])
    return torch.einsum("hqk,khe->qhe", (scores - lse[..., None]).exp(), v.repeat_interleave(group, dim=1)), lse


def run_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_QK: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from probabilities under the given log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    k_wide, v_wide = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = capped(torch.einsum("qhd,khd->hqk", q, k_wide) * scale, softcap)
    probs = (scores - lse[..., None]).exp().masked_fill(~mask_QK, 0)
    dscores = probs * (torch.einsum("qhe,khe->hqk", dout, v_wide) - (dout * out).sum(dim=-1).T[..., None])
    if softcap is not None:
        dscores = dscores * (1 - (scores / softcap) ** 2)
    dscores = dscores * scale
    return (
        torch.einsum("hqk,khd->qhd", dscores, k_wide),
        torch.einsum("hqk,qhd->khd", dscores, q).unflatten(1, (-1, group)).sum(dim=2),
        torch.einsum("hqk,qhe->khe", probs, dout).unflatten(1, (-1, group)).sum(dim=2),
    )


def causal_mask(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    return mask.tril(diagonal=k.shape[0] - q.shape[0]) if is_causal else mask


def forward_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: list[Run],
    is_causal: bool,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = poisoned_like(q.new_empty(*q.shape[:2], v.shape[2]))
    lse = poisoned_like(q.new_empty(q.shape[1], q.shape[0]))
    for run in runs:
        q_run, k_run = q[run.rows], k[run.keys]
        mask = causal_mask(q_run, k_run, is_causal)
        out[run.rows], lse[:, run.rows] = attend_run(q_run, k_run, v[run.keys], mask, scale, softcap, sinks_H)
    return out, lse


def backward_runs(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: list[Run],
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (poisoned_like(x) for x in (q, k, v))
    for run in runs:
        rows, keys = run.rows, run.keys
        mask = causal_mask(q[rows], k[keys], is_causal)
        dq[rows], dk[keys], dv[keys] = run_gradients(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], mask, scale, softcap
        )
    return dq, dk, dv


def mask_of_tiles(
    num_rows: int,
    tile: tuple[int, int],
    lists: list[tuple[Tensor, Tensor, bool]],
    rule: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[T, T] bool as a kernel that walks lists sees it: nothing of unlisted tiles, all of full ones, else the rule.

    lists: counts [1, 1, R], numbers [1, 1, R, I] and whether their tiles are full. Entries past a count are not read.
    """
    rows_T = torch.arange(num_rows)
    by_rule = rule(rows_T[:, None], rows_T[None, :])
    mask = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    own_tile, other_tile = tile
    num_tiles = -(-num_rows // own_tile)
    for counts, numbers, is_full in lists:
        assert counts.dtype == numbers.dtype == torch.int32
        assert counts.shape == (1, 1, num_tiles) and numbers.shape[:3] == counts.shape, "not the kernel's tiles"
        assert 1 <= numbers.shape[3] <= -(-num_rows // other_tile), "lists are longer than there are tiles"
        for own in range(num_tiles):
            listed = numbers[0, 0, own, : int(counts[0, 0, own])].tolist()
            assert listed == sorted(set(listed)), "a tile is listed twice"
            for other in listed:
                index = (
                    slice(own * own_tile, (own + 1) * own_tile),
                    slice(other * other_tile, (other + 1) * other_tile),
                )
                assert not mask[index].any(), "a tile is full and partial"
                mask[index] = True if is_full else by_rule[index]
    return mask
