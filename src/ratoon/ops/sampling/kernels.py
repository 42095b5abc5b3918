"""Inverse-CDF sampling in two passes: sums of tiles of the vocabulary, then the tile that holds the draw.

The same draws as `ratoon.rollout.draws.sample_tokens`, whose sums run through the vocabulary one by one: they may
differ where a threshold lies within float64 rounding of a token's edge.
"""

# Type checkers take a kernel's functions for ones that never return.
# pyright: reportGeneralTypeIssues=false

# Shape letters: B rows, V vocabulary, N tiles of it.

import triton
import triton.language as tl

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""

UNUSED_BITS = tl.constexpr(16)
STEP = tl.constexpr(2.0**-48)
"""48 bits make a number: few enough that the largest, times any total, rounds below that total in float64."""


@triton.jit
def uniform_of(key, position):
    """float64 in (0, 1): output number `position` of the stream that starts at `key` (both int64 in memory)."""
    bits = key.to(tl.uint64) + (position + 1).to(tl.uint64) * tl.full([], GAMMA, tl.uint64)
    bits = (bits ^ (bits >> 30)) * tl.full([], MIX_1, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], MIX_2, tl.uint64)
    bits = bits ^ (bits >> 31)
    return ((bits >> UNUSED_BITS).to(tl.float64) + 0.5) * STEP


@triton.jit
def tile_sums_kernel(
    logits_ptr, temperature_ptr, highest_ptr, sums_ptr, likeliest_ptr, stride_b, V, num_tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of one tile of one row: its largest logit, sum of exp((logit - largest) / temperature), and the largest's id."""
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride_b + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    highest = tl.max(logits, axis=0)
    # A tile may hold nothing but -inf.
    reference = tl.where(highest == -float("inf"), 0.0, highest)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    weights = tl.exp((logits.to(tl.float64) - reference) * scale)
    place = row * num_tiles + tile
    tl.store(highest_ptr + place, highest)
    tl.store(sums_ptr + place, tl.sum(weights, axis=0))
    tl.store(likeliest_ptr + place, tile * TILE + tl.argmax(logits, axis=0))


@triton.jit
def combine_tiles(highest_ptr, sums_ptr, row, num_tiles, scale, BLOCK_N: tl.constexpr):
    """A row's largest logit, each tile's [N], each tile's sum of exp((logit - row's largest) / temperature) [N], and
    the sum of those."""
    tiles = tl.arange(0, BLOCK_N)
    places = row * num_tiles + tiles
    highest_N = tl.load(highest_ptr + places, mask=tiles < num_tiles, other=-float("inf"))
    highest = tl.max(highest_N, axis=0)
    sums_N = tl.load(sums_ptr + places, mask=tiles < num_tiles, other=0.0)
    weights_N = tl.where(highest_N == -float("inf"), 0.0, sums_N * tl.exp((highest_N - highest).to(tl.float64) * scale))
    return highest, highest_N, weights_N, tl.sum(weights_N, axis=0)


@triton.jit
def draw_kernel(
    logits_ptr, temperature_ptr, key_ptr, position_ptr, highest_ptr, sums_ptr, likeliest_ptr, token_ptr, logprob_ptr,
    stride_b, V, num_tiles,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row's token and its log-prob: 0 for a greedy row; not finite where the row's logits are not."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    tiles = tl.arange(0, BLOCK_N)
    places = row * num_tiles + tiles
    highest, highest_N, weights_N, total = combine_tiles(highest_ptr, sums_ptr, row, num_tiles, scale, BLOCK_N)
    until_N = tl.cumsum(weights_N, axis=0)
    threshold = uniform_of(tl.load(key_ptr + row), tl.load(position_ptr + row)) * total
    # The first tile whose end lies behind the threshold, or the last with a chance.
    last = tl.max(tl.where(weights_N > 0.0, tiles, 0), axis=0)
    tile = tl.minimum(tl.sum((until_N <= threshold).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(tiles < tile, weights_N, 0.0), axis=0)
    offs = tl.arange(0, TILE)
    ids = tile * TILE + offs
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride_b + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    weights = tl.exp((logits.to(tl.float64) - highest) * scale)
    until = before + tl.cumsum(weights, axis=0)
    last_id = tl.max(tl.where(weights > 0.0, offs, 0), axis=0)
    drawn = tl.minimum(tl.sum((until <= threshold).to(tl.int32), axis=0), last_id)
    logit = tl.sum(tl.where(offs == drawn, logits, 0.0), axis=0)
    likeliest_N = tl.load(likeliest_ptr + places, mask=tiles < num_tiles, other=0)
    likeliest = tl.min(tl.where(highest_N == highest, likeliest_N, V - 1), axis=0)
    is_greedy = temperature == 0.0
    token = tl.where(is_greedy, likeliest, tile * TILE + drawn)
    logprob = (logit.to(tl.float64) - highest) * scale - tl.log(total)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(is_greedy, total * 0.0, logprob).to(tl.float32))
