"""Reads and attention of a batch against one softmax a query in float64, and the block budget at its limit."""

# Shape letters: H query heads, K key heads, D head dim.

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.conftest import Build
from tests.rollout.tiny import assert_same_group, draw, make_prompts
from torch import Tensor

from ratoon.rollout.engines.cache_budget import CacheLayout
from ratoon.rollout.engines.paged_attention import _Layer
from ratoon.rollout.engines.reads import LayerReads, Request
from ratoon.types import SamplingParams

CPU = torch.device("cpu")
NUM_SLOTS = 90


@st.composite
def batches(draw_: st.DrawFn) -> list[Request]:
    """Families of single-token requests over shared prompts, lone ones, and longer ones, in any order."""
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    requests: list[Request] = []
    for family in range(draw_(st.integers(0, 3))):
        num_shared = int(rng.integers(0, 20))
        shared = rng.permutation(NUM_SLOTS)[:num_shared]
        for _ in range(int(rng.integers(1, 5))):
            own = rng.permutation(np.setdiff1d(np.arange(NUM_SLOTS), shared))[: rng.integers(1, 12)]
            requests.append(Request(1, np.concatenate([shared, own]), family, num_shared))
    for _ in range(draw_(st.integers(0 if requests else 1, 2))):
        num_queries = int(rng.integers(2, 7))
        slots = rng.permutation(NUM_SLOTS)[: num_queries + rng.integers(0, 9)]
        requests.append(Request(num_queries, slots))
    return [requests[index] for index in rng.permutation(len(requests))]


def dense(layer: _Layer, q_RHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, requests: list[Request]) -> Tensor:
    out: list[Tensor] = []
    row = 0
    num_groups = q_RHD.shape[1] // k_TKD.shape[1]
    for request in requests:
        for query in range(request.num_queries):
            end = request.slots.size - request.num_queries + query + 1
            start = 0 if layer.window is None else max(0, end - layer.window)
            slots = torch.from_numpy(request.slots[start:end])
            k_TH = k_TKD[slots].double().repeat_interleave(num_groups, dim=1)
            scores_TH = torch.einsum("hd,thd->th", q_RHD[row].double(), k_TH) * layer.scale
            if layer.softcap is not None:
                scores_TH = torch.tanh(scores_TH / layer.softcap) * layer.softcap
            if layer.sinks_H is not None:
                scores_TH = torch.cat([scores_TH, layer.sinks_H.double()[None]])
            probs_TH = torch.softmax(scores_TH, dim=0)[: slots.numel()]
            out.append(torch.einsum("th,thd->hd", probs_TH, v_TKD[slots].double().repeat_interleave(num_groups, dim=1)))
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@given(requests=batches())
@settings(max_examples=25, deadline=None)
def test_attention_over_shared_and_own_keys_is_one_softmax(
    requests: list[Request], window: int | None, softcap: float | None, has_sinks: bool
):
    if window is not None:
        # A sliding layer shares nothing, and the cache hands it single tokens' windows only.
        requests = [Request(r.num_queries, r.slots[-window:] if r.num_queries == 1 else r.slots) for r in requests]
    generator = torch.Generator().manual_seed(sum(r.slots.size for r in requests))
    num_rows = sum(request.num_queries for request in requests)
    q_RHD = torch.randn(num_rows, 4, 6, generator=generator)
    k_TKD, v_TKD = torch.randn(2, NUM_SLOTS, 2, 6, generator=generator)
    layer = _Layer(0.4, window, softcap, torch.randn(4, generator=generator) if has_sinks else None)
    out = layer.attend(q_RHD, k_TKD, v_TKD, LayerReads.plan(requests, CPU))
    torch.testing.assert_close(out.double(), dense(layer, q_RHD, k_TKD, v_TKD, requests), rtol=0, atol=2e-6)


def test_a_prompt_is_read_once_for_its_responses():
    shared = np.arange(32)
    requests = [Request(1, np.concatenate([shared, [40 + index]]), "p", 32) for index in range(8)]
    reads = LayerReads.plan(requests, CPU)
    assert reads.shared is not None
    assert reads.shared.slots_UT.shape == (1, 32)
    assert reads.slots_BT.tolist() == [[40 + index] for index in range(8)]


@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 9))
def test_a_budget_covers_each_responses_blocks(num_prompt_tokens: int, max_response_tokens: int, group_size: int):
    layout = CacheLayout(block_tokens=16, num_full=1, num_sliding=0, window=None)
    # Every block any response touches: whole prompt blocks once, everything after them for each response.
    whole = (num_prompt_tokens - 1) // 16 if group_size > 1 else 0
    touched = -(-(num_prompt_tokens + max_response_tokens - 1) // 16)
    least = whole + group_size * (touched - whole)
    assert least <= layout.blocks(num_prompt_tokens, max_response_tokens, group_size) <= least + 3 * group_size
    sliding = CacheLayout(block_tokens=16, num_full=0, num_sliding=2, window=24)
    assert sliding.blocks(num_prompt_tokens, max_response_tokens, group_size) <= 2 * 2 * group_size


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_the_smallest_cache_that_is_accepted_suffices(build: Build, seed: int):
    """What is admitted never runs out of blocks, however tight the cache, and draws as with room to spare."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(1, 60, size=4)]
    sampling = SamplingParams(temperature=1.0, max_response_tokens=int(rng.integers(1, 70)), seed=seed)
    group_size = int(rng.integers(1, 7))
    prompts = make_prompts(lengths, seed=seed)
    layout = CacheLayout(block_tokens=16, num_full=1, num_sliding=0, window=None)
    tight = max(layout.blocks(length, sampling.max_response_tokens, 1) for length in lengths) * 16
    whole = draw(build(), prompts, group_size, sampling)
    for cache_tokens in (tight, 2 * tight):
        engine = build(cache_tokens=cache_tokens, max_concurrent_responses=int(rng.integers(1, 12)))
        for group, reference in zip(draw(engine, prompts, group_size, sampling), whole, strict=True):
            assert_same_group(group, reference)
