"""The forward kernel: a program owns a tile of rows of one head, and walks the tiles of keys that those rows read."""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim,
# M rows of a tile, N keys of a tile.

import triton
import triton.language as tl

from ratoon.attention.triton.scores import LN2, LOG2E, cap_scores, dot, is_read, load_tile, store_tile, wide
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@triton.jit
def weigh(
    products, highest, total, excess, softmax_scale, softcap,
    dtype: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (FlashAttention-2, algorithm 1), from q.k [M, N].

    highest: [M] largest score so far, in the unit of `products` (softmax_scale is positive, so that
    the largest product is the largest score). excess: [M] by how much more probs rounded to `dtype`, which weigh
    the values, add up to than exact ones, in partial tiles: those of rows with few keys, where it tells most.
    Returns probs [M, N] in dtype, what earlier sums shrink by [M], highest, total, excess.
    """
    if HAS_SOFTCAP:
        products = cap_scores(products * softmax_scale, softcap)
        factor = LOG2E
    else:
        factor = softmax_scale * LOG2E
    new_highest = tl.maximum(highest, tl.max(products, axis=1))
    if IS_PARTIAL:
        # A row that has read no key yet has no highest score: any finite one will do.
        reference = tl.where(new_highest == -float("inf"), 0.0, new_highest) * factor
    else:
        reference = new_highest * factor
    # In base 2, with one multiply-add a score: the hardware has exp2, and the factor is free.
    probs = tl.exp2(products * factor - reference[:, None])
    shrink = tl.exp2(highest * factor - reference)
    rounded = probs.to(dtype)
    excess = excess * shrink
    if IS_PARTIAL:
        excess += tl.sum(rounded.to(tl.float32) - probs, axis=1)
    return rounded, shrink, new_highest, total * shrink + tl.sum(probs, axis=1), excess


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_tiles, softmax_scale, softcap, window,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    LOOK_AHEAD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """LOOK_AHEAD: multiply the next keys while this tile's scores are weighed. Costs registers."""
    # Heads are the slow index: programs that run at the same time read the same keys.
    head = tl.program_id(0) // num_tiles
    kv_head = head // GROUP
    tile = tl.load(tile_ptr + tl.program_id(0) % num_tiles)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    offs_n = tl.arange(0, BLOCK_N)
    q = load_tile(q_desc, tile * BLOCK_M, head, BLOCK_M, BLOCK_D)

    if HAS_SINKS:  # a key that every row has read already, with value 0
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        highest = tl.zeros([BLOCK_M], tl.float32) + (sink if HAS_SOFTCAP else sink / softmax_scale)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    excess = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    for interval in range(tl.load(full_offsets_ptr + tile), tl.load(full_offsets_ptr + tile + 1)):
        start = tl.load(full_start_ptr + interval)
        end = tl.load(full_end_ptr + interval)
        if LOOK_AHEAD:
            k = load_tile(k_desc, start * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
            products = dot(q, tl.trans(k), UPCAST)
            for key_tile in range(start, end - 1):
                k = load_tile(k_desc, key_tile * BLOCK_N + BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
                next_products = dot(q, tl.trans(k), UPCAST)
                probs, shrink, highest, total, excess = weigh(
                    products, highest, total, excess, softmax_scale, softcap, v_desc.dtype, HAS_SOFTCAP, False
                )
                v = load_tile(v_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
                out = dot(probs, v, UPCAST, out * shrink[:, None])
                products = next_products
            probs, shrink, highest, total, excess = weigh(
                products, highest, total, excess, softmax_scale, softcap, v_desc.dtype, HAS_SOFTCAP, False
            )
            v = load_tile(v_desc, end * BLOCK_N - BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
            out = dot(probs, v, UPCAST, out * shrink[:, None])
        else:
            for key_tile in range(start, end):
                k = load_tile(k_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
                products = dot(q, tl.trans(k), UPCAST)  # [M, N]
                probs, shrink, highest, total, excess = weigh(
                    products, highest, total, excess, softmax_scale, softcap, v_desc.dtype, HAS_SOFTCAP, False
                )
                v = load_tile(v_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
                out = dot(probs, v, UPCAST, out * shrink[:, None])

    row_positions = tl.load(positions_ptr + rows, mask=rows < T, other=0) if HAS_WINDOW else rows
    for interval in range(tl.load(partial_offsets_ptr + tile), tl.load(partial_offsets_ptr + tile + 1)):
        for key_tile in range(tl.load(partial_start_ptr + interval), tl.load(partial_end_ptr + interval)):
            keys = key_tile * BLOCK_N + offs_n
            expiry = tl.load(expiry_ptr + keys, mask=keys < T, other=0)
            key_positions = tl.load(positions_ptr + keys, mask=keys < T, other=0) if HAS_WINDOW else keys
            k = load_tile(k_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
            products = dot(q, tl.trans(k), UPCAST)
            if HAS_SOFTCAP:
                products = cap_scores(products * softmax_scale, softcap)
            allowed = is_read(
                rows[:, None], keys[None, :], expiry[None, :],
                row_positions[:, None], key_positions[None, :], window, HAS_WINDOW,
            )  # fmt: skip
            products = tl.where(allowed, products, -float("inf"))
            probs, shrink, highest, total, excess = weigh(
                products,
                highest,
                total,
                excess,
                1.0 if HAS_SOFTCAP else softmax_scale,
                softcap,
                v_desc.dtype,
                False,
                True,
            )
            v = load_tile(v_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
            out = dot(probs, v, UPCAST, out * shrink[:, None])

    # A row without keys: output 0, log-sum-exp minus infinity.
    total_or_1 = tl.where(total == 0.0, 1.0, total)
    out = out / (total_or_1 + excess)[:, None]
    lse = highest * (1.0 if HAS_SOFTCAP else softmax_scale) + tl.log2(total_or_1) * LN2
    store_tile(out_desc, tile * BLOCK_M, head, out, BLOCK_M, BLOCK_E)
    tl.store(lse_ptr + wide(head) * stride_lh + rows, lse, mask=rows < T)
