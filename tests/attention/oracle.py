"""Forests to draw, and two oracles that know nothing of expiry, levels or blocks."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim.

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ratoon.layout import PackedLayout, pack_documents, pack_groups, pack_sequences
from ratoon.types import Prompt, Response, RolloutGroup


def make_groups(*shapes: tuple[int, list[int]]) -> PackedLayout:
    """(P, [R, ...]) for each group."""
    return pack_groups(
        [
            RolloutGroup(Prompt(index, np.arange(P)), tuple(Response(np.arange(R)) for R in lengths))
            for index, (P, lengths) in enumerate(shapes)
        ]
    )


def make_tree(lengths: list[int], parents: list[int]) -> PackedLayout:
    """A forest of nodes with these lengths; a parent comes before its children, -1 has none."""
    fresh = itertools.count()
    paths: list[list[int]] = []
    for length, parent in zip(lengths, parents, strict=True):
        own = list(itertools.islice(fresh, length))
        paths.append((paths[parent] if parent >= 0 else []) + own)
    return pack_sequences(paths)


def make_chain(depth: int, length: int) -> PackedLayout:
    """A path with two leaves at every node, so that no node merges with its parent."""
    lengths, parents, tip = [length], [-1], 0
    for _ in range(depth):
        parents += [tip, tip]
        lengths += [length, length + 1]
        tip = len(lengths) - 2
    return make_tree(lengths, parents)


@st.composite
def trees(draw: st.DrawFn) -> PackedLayout:
    """Forests to depth 4, segments from length 1, any order of branches."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=10))
    parents: list[int] = []
    depths: list[int] = []
    for node in range(len(lengths)):
        parent = draw(st.sampled_from([-1, *(p for p in range(node) if depths[p] < 4)]))
        parents.append(parent)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return make_tree(lengths, parents)


groups = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 6), min_size=0, max_size=4)), min_size=1, max_size=4
).map(lambda shapes: make_groups(*shapes))

documents = st.lists(st.integers(0, 6), min_size=1, max_size=9).map(
    lambda lengths: pack_documents([np.arange(length) for length in lengths])
)

forests = st.one_of(trees(), groups, documents)


@dataclass(frozen=True)
class Case:
    """Inputs of one attention, with what the output is weighted by in a scalar loss."""

    q_THD: Tensor
    k_THD: Tensor
    v_THE: Tensor
    sinks_H: Tensor | None
    dout_THE: Tensor
    softmax_scale: float | None = None
    softcap: float | None = None

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Case":
        tensors = (self.q_THD, self.k_THD, self.v_THE, self.dout_THE)
        q_THD, k_THD, v_THE, dout_THE = (x.to(device, dtype) for x in tensors)
        sinks_H = None if self.sinks_H is None else self.sinks_H.to(device, dtype)
        return replace(self, q_THD=q_THD, k_THD=k_THD, v_THE=v_THE, dout_THE=dout_THE, sinks_H=sinks_H)


def make_case(
    layout: PackedLayout,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    v_head_dim: int | None = None,
    has_sinks: bool = False,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    seed: int = 0,
) -> Case:
    """float64 inputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    T, (Hq, Hkv), E = layout.num_rows, heads, v_head_dim or head_dim
    return Case(
        q_THD=draw(T, Hq, head_dim),
        k_THD=draw(T, Hkv, head_dim),
        v_THE=draw(T, Hkv, E),
        sinks_H=draw(Hq) if has_sinks else None,
        dout_THE=draw(T, Hq, E),
        softcap=softcap,
        softmax_scale=softmax_scale,
    )


def paths_of(layout: PackedLayout) -> list[list[int]]:
    """For each row, the rows from its root to itself, walked from segment to parent."""
    offsets, parents = layout.segment_offsets.tolist(), layout.segment_parent.tolist()
    before: list[list[int]] = []
    paths: list[list[int]] = []
    for segment, parent in enumerate(parents):
        upstream = before[parent] if parent >= 0 else []
        rows = list(range(offsets[segment], offsets[segment + 1]))
        paths.extend(upstream + rows[: i + 1] for i in range(len(rows)))
        before.append(upstream + rows)
    return paths


def dense_mask(layout: PackedLayout, window: int | None = None) -> Tensor:
    """[T, T] bool from the paths: a row reads the last `window` rows of its own path."""
    mask_TT = torch.zeros(layout.num_rows, layout.num_rows, dtype=torch.bool)
    for row, path in enumerate(paths_of(layout)):
        mask_TT[row, path if window is None else path[-window:]] = True
    return mask_TT


def dense_attention(case: Case, mask_TT: Tensor) -> Tensor:
    """Softmax over a dense mask, one head at a time, in the inputs' dtype; differentiable."""
    Hq, Hkv = case.q_THD.shape[1], case.k_THD.shape[1]
    scale = 1 / math.sqrt(case.q_THD.shape[2]) if case.softmax_scale is None else case.softmax_scale
    outs: list[Tensor] = []
    for head in range(Hq):
        kv_head = head // (Hq // Hkv)
        scores_TT = case.q_THD[:, head] @ case.k_THD[:, kv_head].T * scale
        if case.softcap is not None:
            scores_TT = case.softcap * torch.tanh(scores_TT / case.softcap)
        weights_TT = torch.where(mask_TT, torch.exp(scores_TT), 0.0)
        sums_T = weights_TT.sum(dim=1)
        if case.sinks_H is not None:
            sums_T = sums_T + torch.exp(case.sinks_H[head])
        outs.append((weights_TT / sums_T[:, None]) @ case.v_THE[:, kv_head])
    return torch.stack(outs, dim=1)


def output_and_gradients(attention: Callable[[Case], Tensor], case: Case) -> list[Tensor]:
    """out, dq, dk, dv and, where there are sinks, dsinks. `attention` maps a Case to its output."""
    inputs = [case.q_THD, case.k_THD, case.v_THE] + ([] if case.sinks_H is None else [case.sinks_H])
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sinks_H = None if case.sinks_H is None else leaves[3]
    live = replace(case, q_THD=leaves[0], k_THD=leaves[1], v_THE=leaves[2], sinks_H=sinks_H)
    out_THE = attention(live)
    return [out_THE.detach(), *torch.autograd.grad(out_THE, leaves, case.dout_THE)]


NAMES = ("out", "dq", "dk", "dv", "dsinks")


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the oracle's largest entry (or of 1)."""
    for name, x, y in zip(NAMES, got, wanted, strict=False):
        assert x.shape == y.shape and x.dtype == y.dtype, f"{name}: {x.shape} {x.dtype}, wanted {y.shape} {y.dtype}"
        if y.numel():
            error = (x - y).abs().max().item() / max(y.abs().max().item(), 1.0)
            assert error <= tolerance, f"{name}: relative error {error:.2e} over {tolerance:.0e}"


_CANCELLED = 1e-12
"""Gradients of float64 inputs of size 1 that are smaller are what rounding leaves of 0."""


def assert_within_error_budget(attention: Callable[[Case], Tensor], case: Case, mask_TT: Tensor) -> None:
    """Largest and RMS error against float64: at most twice those of eager attention in the case's dtype.

    Each with a band of one rounding: of the largest entry, or of all terms that a sum over rows adds up. In float32 of
    four, on a GPU of eight: an exponential is out by two there, and scores of size 8 less their log-sum-exp carry
    eight times an exponential's rounding, where eager attention subtracts numbers that are near each other.

    Where rows read nothing but themselves, gradients are 0 of terms that cancel: the band is then of terms of size 1.

    Eager attention adds up dv head by head. A kernel adds row to row over all heads of a group, which in float32 loses
    more where they are many: there the yardstick is float32 in that order, from exact weights, if it is farther off.
    """
    case64 = case.to(torch.float64, str(case.q_THD.device))
    exact = output_and_gradients(lambda case: dense_attention(case, mask_TT), case64)
    eager = output_and_gradients(lambda case: dense_attention(case, mask_TT), case)
    ours = output_and_gradients(attention, case)
    scales = [x.abs().max().item() for x in exact]
    scales = [scale if scale > _CANCELLED else 1.0 for scale in scales]
    if case64.sinks_H is not None:
        ones = replace(case64, v_THE=torch.ones_like(case64.v_THE[..., :1]))
        sink_probs_TH = 1 - dense_attention(ones, mask_TT)[..., 0]
        terms_TH = sink_probs_TH * (exact[0] * case64.dout_THE).sum(dim=-1)
        scales[4] = terms_TH.abs().sum(dim=0).max().item()
    for name, x, y, z, scale in zip(NAMES, ours, eager, exact, scales, strict=False):
        assert x.dtype == case.q_THD.dtype, f"{name} is {x.dtype}"
        roundings = 1 if x.dtype != torch.float32 else 8 if x.is_cuda else 4
        band = torch.finfo(x.dtype).eps * scale * roundings
        error, allowed = x.double() - z, y.double() - z
        for kind, size in (("largest", _largest), ("RMS", _rms)):
            got, most = size(error), 2 * size(allowed) + band
            if got > most and name == "dv" and x.dtype == torch.float32:
                most = 2 * size(_dv_added_in_order(case64, mask_TT) - z) + band
            assert got <= most, f"{name}: {kind} error {got:.3g}, allowed {most:.3g}, of which a rounding {band:.3g}"


def _dv_added_in_order(case64: Case, mask_TT: Tensor) -> Tensor:
    """[T, Hkv, E] float64: exact weights times `dout`, added row after row of head after head in float32."""
    T, Hkv = case64.k_THD.shape[:2]
    each_key_THT = torch.eye(T, dtype=torch.float64, device=mask_TT.device)[:, None].expand(T, Hkv, T)
    weights_THT = dense_attention(replace(case64, v_THE=each_key_THT), mask_TT).float()
    dout_THE = case64.dout_THE.float()
    dv_THE = torch.zeros_like(case64.v_THE, dtype=torch.float32)
    group = case64.q_THD.shape[1] // Hkv
    for member in range(group):
        for row in range(T):
            weights_HT, dout_HE = weights_THT[row, member::group], dout_THE[row, member::group]
            dv_THE += (weights_HT[:, :, None] * dout_HE[:, None]).transpose(0, 1)
    return dv_THE.double()


def _largest(error: Tensor) -> float:
    return error.abs().max().item()


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()
