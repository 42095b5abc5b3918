"""Decoding from blocks against float64 attention over each response's own keys."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.attention.paged.decode import DeviceReads, decode, max_members, write_keys
from ratoon.attention.paged.reads import build_reads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Batch:
    """Groups of (prompt tokens, own tokens of each response)."""

    groups: list[tuple[int, list[int]]]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    block_tokens: int = 16
    split_keys: int = 32
    room_tokens: int = 0

    @property
    def own_tokens(self) -> list[int]:
        return [R for _, lengths in self.groups for R in lengths]


def padded(tables: list[list[int]]) -> NDArray[np.int32]:
    """One row each; what stands behind a row's end is no block."""
    width = max(map(len, tables))
    return np.array([[*table, *[1 << 30] * (width - len(table))] for table in tables], np.int32)


def run(
    batch: Batch, device: str, dtype: torch.dtype, *, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, order: list[int] | None = None, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernels give, and float64 by each response's keys: [B, Hq, E] both.

    The newest key and value are written by the kernel, into caches whose unused places hold NaN."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    (Hq, Hkv), (D, E), N = batch.heads, batch.dims, batch.block_tokens
    lengths = [*(P for P, _ in batch.groups), *(R + batch.room_tokens for R in batch.own_tokens)]
    counts = [-(-length // N) for length in lengths]
    numbers = iter(rng.permutation(sum(counts) + 3).tolist())
    tables = [[next(numbers) for _ in range(count)] for count in counts]
    k_cache = torch.full((sum(counts) + 3, Hkv, N, D), torch.nan, dtype=torch.float64)
    v_cache = torch.full((sum(counts) + 3, Hkv, N, E), torch.nan, dtype=torch.float64)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    def fill(table: list[int], length: int) -> tuple[Tensor, Tensor]:
        k, v = draw(length, Hkv, D), draw(length, Hkv, E)
        for token in range(length):
            k_cache[table[token // N], :, token % N] = k[token]
            v_cache[table[token // N], :, token % N] = v[token]
        return k, v

    B, U = len(batch.own_tokens), len(batch.groups)
    q_BHD, k_new, v_new = draw(B, Hq, D), draw(B, Hkv, D), draw(B, Hkv, E)
    expected, row = [], 0
    for number, (P, own) in enumerate(batch.groups):
        k_prompt, v_prompt = fill(tables[number], P)
        for R in own:
            k_own, v_own = fill(tables[U + row], R - 1)
            k = torch.cat([k_prompt, k_own, k_new[row : row + 1]]).repeat_interleave(Hq // Hkv, dim=1)
            v = torch.cat([v_prompt, v_own, v_new[row : row + 1]]).repeat_interleave(Hq // Hkv, dim=1)
            if window is not None:
                k, v = k[-window:], v[-window:]
            scores = torch.einsum("hd,thd->ht", q_BHD[row], k) * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            probs = scores.softmax(dim=1)[:, : k.shape[0]]
            expected.append(torch.einsum("ht,the->he", probs, v))
            row += 1
    reads = build_reads(
        np.repeat(np.arange(U), [len(own) for _, own in batch.groups]), padded(tables[:U]),
        np.array([P for P, _ in batch.groups]), padded(tables[U:]), np.array(batch.own_tokens),
        block_tokens=N, split_keys=batch.split_keys, max_members=max_members(Hq // Hkv), room_tokens=batch.room_tokens,
    )  # fmt: skip
    on_device = DeviceReads.of(reads, torch.device(device))
    k_cache, v_cache = k_cache.to(device, dtype), v_cache.to(device, dtype)
    write_keys(k_new.to(device, dtype), v_new.to(device, dtype), k_cache, v_cache, on_device)
    scoring, sinks = Scoring(softmax_scale=0.3, softcap=softcap), None if sinks is None else sinks.to(device)
    out = decode(
        q_BHD.to(device, dtype), k_cache, v_cache, on_device, scoring, window=window, sinks_H=sinks
    )  # fmt: skip
    return out.double().cpu(), torch.stack(expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=5)), min_size=1, max_size=4
    ),
    st.sampled_from([None, 1, 9, 33]),
    st.sampled_from([0, 1, 40]),
)
def test_exact(device: str, groups: list[tuple[int, list[int]]], window: int | None, room: int):
    got, want = run(Batch(groups, room_tokens=room), device, torch.float32, window=window)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "dims"), [((9, 3), (64, 64)), ((4, 4), (24, 40)), ((16, 1), (16, 16)), ((6, 2), (128, 128))]
)
def test_heads_and_dims(device: str, heads: tuple[int, int], dims: tuple[int, int]):
    batch = Batch([(37, [3, 20, 1]), (5, [2])], heads=heads, dims=dims)
    got, want = run(batch, device, torch.float32, sinks=torch.randn(heads[0]), softcap=2.0)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_sixteen_bits(device: str):
    got, want = run(Batch([(50, [9] * 7)], dims=(64, 64)), device, torch.bfloat16)
    assert (got - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_more_siblings_than_an_item_holds(device: str):
    got, want = run(Batch([(33, [1, 2, 3] * 6)], heads=(8, 2)), device, torch.float32)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
