"""Batch-invariant attention: exact, and a row's bits are the same in every layout and over every cache."""

# Shape letters: T rows, H heads, D head dim, P prompt tokens, R response tokens, F blocks, N keys of a block.

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.attention.oracle import (
    Case,
    assert_within_error_budget,
    dense_mask,
    forests,
    make_case,
    make_groups,
    output_and_gradients,
)
from tests.sampling import sampled
from torch import Tensor

from ratoon.attention import AttentionPlan, forest_attention
from ratoon.attention.invariant.attention import attend_tiles, tile_sizes
from ratoon.attention.invariant.reads import BLOCK_TOKENS, Segment, Span, build_tiles
from ratoon.attention.kernel import Scoring
from ratoon.layout import PackedLayout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attention(layout: PackedLayout, device: str, window: int | None = None):
    plan = AttentionPlan.build(layout, device=device, window=window)

    def call(case: Case) -> Tensor:
        return forest_attention(
            case.q_THD, case.k_THD, case.v_THE, plan, softmax_scale=case.softmax_scale, softcap=case.softcap,
            sinks_H=case.sinks_H, impl="invariant",
        )  # fmt: skip

    return call


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=8)
@given(forests)
def test_exact_on_any_forest(device: str, layout: PackedLayout):
    case = make_case(layout).to(torch.float32, device)
    if layout.num_rows:
        assert_within_error_budget(attention(layout, device), case, dense_mask(layout).to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("window", "has_sinks", "softcap", "heads", "dims"),
    sampled(
        (33, True, 2.0, (6, 2), (24, 40)),
        (None, False, None, (9, 3), (64, 64)),
        (5, False, None, (4, 4), (8, 8)),
        (64, True, None, (16, 1), (128, 128)),
        (None, False, 3.0, (2, 1), (256, 256)),
        (None, False, None, (70, 1), (16, 16)),
    ),
)
def test_exact_with_all_that_models_ask_for(
    device: str,
    window: int | None,
    has_sinks: bool,
    softcap: float | None,
    heads: tuple[int, int],
    dims: tuple[int, int],
):
    layout = make_groups((70, [3, 66, 1]), (5, [2]))
    case = make_case(
        layout, heads=heads, head_dim=dims[0], v_head_dim=dims[1], has_sinks=has_sinks, softcap=softcap
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        mask_TT = dense_mask(layout, window).to(device)
        assert_within_error_budget(attention(layout, device, window), case.to(dtype, device), mask_TT)


def group_case(P: int, R: int, dtype: torch.dtype, device: str, heads: tuple[int, int], seed: int = 0) -> Case:
    """q, k and v of one prompt and one response."""
    return make_case(make_groups((P, [R])), heads=heads, head_dim=32, seed=seed).to(dtype, device)


def beside_others(case: Case, P: int, R: int, device: str, window: int | None) -> Tensor:
    """The same prompt and response behind another group, and with an older sibling; what comes out of their rows."""
    dtype, heads = case.q_THD.dtype, (case.q_THD.shape[1], case.k_THD.shape[1])
    layout = make_groups((13, [7]), (P, [21, R]))
    others = make_case(layout, heads=heads, head_dim=32, seed=9).to(dtype, device)
    prompt, response = slice(20, 20 + P), slice(20 + P + 21, 20 + P + 21 + R)
    for mixed, own in ((others.q_THD, case.q_THD), (others.k_THD, case.k_THD), (others.v_THE, case.v_THE)):
        mixed[prompt], mixed[response] = own[:P], own[P:]
    out_THE = attention(layout, device, window)(others)
    return torch.cat([out_THE[prompt], out_THE[response]])


def over_a_cache(case: Case, P: int, R: int, device: str, window: int | None) -> Tensor:
    """The prompt in two pieces, and then the response a row at a time, from blocks in any order."""
    num_heads, Hkv, D = case.q_THD.shape[1], *case.k_THD.shape[1:]
    counts = -(-P // BLOCK_TOKENS), -(-R // BLOCK_TOKENS)
    blocks = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int32)
    tables = blocks[: counts[0]], blocks[counts[0] : sum(counts)]
    k_FHND, v_FHND = (
        torch.full((blocks.size, Hkv, BLOCK_TOKENS, D), torch.nan, dtype=case.q_THD.dtype, device=device)
        for _ in range(2)
    )
    for first, length, table in ((0, P, tables[0]), (P, R, tables[1])):
        for key in range(length):
            place = int(table[key // BLOCK_TOKENS]), slice(None), key % BLOCK_TOKENS
            k_FHND[place], v_FHND[place] = case.k_THD[first + key], case.v_THE[first + key]
    scoring = Scoring(softmax_scale=D**-0.5)
    tile_tokens = tile_sizes(case.q_THD, num_heads // Hkv, D).tokens
    prompt = Segment(length=P, position=0, blocks=tables[0])
    cut = P // 3
    outs: list[Tensor] = []
    for start, end in ((0, cut), (cut, P)):
        spans = [Span(first_row=0, start=start, end=end, segment=0)] if start < end else []
        tiles = build_tiles(spans, [prompt], tile_tokens, torch.device(device))
        outs.append(attend_tiles(case.q_THD[start:end], k_FHND, v_FHND, tiles, scoring, window=window)[0])
    for index in range(R):
        own = Segment(length=index + 1, position=P, blocks=tables[1])
        span = Span(first_row=0, start=index, end=index + 1, segment=1, ancestors=(0,))
        tiles = build_tiles([span], [prompt, own], tile_tokens, torch.device(device))
        row = slice(P + index, P + index + 1)
        outs.append(attend_tiles(case.q_THD[row], k_FHND, v_FHND, tiles, scoring, window=window)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("P", "R", "heads", "window"),
    sampled((67, 3, (3, 1), 50), (130, 70, (3, 1), None), (1, 9, (2, 2), 4), (64, 65, (8, 2), 64), keep=1),
)
def test_a_rows_bits_are_its_own(
    device: str, dtype: torch.dtype, P: int, R: int, heads: tuple[int, int], window: int | None
):
    case = group_case(P, R, dtype, device, heads)
    alone_THE = attention(make_groups((P, [R])), device, window)(case)
    assert torch.equal(alone_THE, beside_others(case, P, R, device, window))
    assert torch.equal(alone_THE, over_a_cache(case, P, R, device, window))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_triton(device: str):
    """Given the same output, bit by bit: the backward kernel is the same."""
    layout = make_groups((37, [9, 20]))
    case = make_case(layout, has_sinks=True).to(torch.float32, device)
    plan = AttentionPlan.build(layout, device=device)
    ours = output_and_gradients(attention(layout, device), case)
    theirs = output_and_gradients(
        lambda case: forest_attention(case.q_THD, case.k_THD, case.v_THE, plan, sinks_H=case.sinks_H, impl="triton"),
        case,
    )
    for x, y in zip(ours, theirs, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-5)


def test_padding_reads_nothing_and_gives_zeros():
    tiles = build_tiles(
        [Span(first_row=0, start=0, end=1, segment=0)],
        [Segment(length=1, position=0, blocks=np.zeros(1, np.int32))],
        16,
        torch.device("cpu"),
    )
    tiles.ends_R.zero_()
    cache = torch.full((1, 1, BLOCK_TOKENS, 16), torch.nan)
    out_THE, lse_HT = attend_tiles(torch.ones(1, 2, 16), cache, cache, tiles, Scoring(softmax_scale=1.0))
    assert (out_THE == 0).all() and (lse_HT == -torch.inf).all()
