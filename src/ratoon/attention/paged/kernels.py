"""The kernels of decoding: one writes new keys, one walks blocks for a few rows, one joins what the walks found."""

# Shape letters: B responses, H heads, D head dim, E value head dim, S slots, M rows of a tile,
# N keys of a tile, which is a block.

import triton
import triton.language as tl

from ratoon.attention.triton.forward import weigh
from ratoon.attention.triton.scores import LN2, LOG2E, cap_scores, dot, wide


@triton.jit
def write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, blocks_ptr, own_table_ptr, own_lengths_ptr,
    stride_kb, stride_kh, stride_vb, stride_vh,
    D: tl.constexpr, E: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The new token's key and value of one head into the cache. A row of length 0 is padding."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(own_lengths_ptr + row) - 1
    if token >= 0:
        block = tl.load(blocks_ptr + tl.load(own_table_ptr + row) + token // BLOCK_TOKENS)
        place = (wide(block) * NUM_KV_HEADS + head) * BLOCK_TOKENS + token % BLOCK_TOKENS
        offs_d, offs_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        k = tl.load(k_ptr + row * stride_kb + head * stride_kh + offs_d, mask=offs_d < D, other=0.0)
        v = tl.load(v_ptr + row * stride_vb + head * stride_vh + offs_e, mask=offs_e < E, other=0.0)
        tl.store(k_cache_ptr + place * D + offs_d, k, mask=offs_d < D)
        tl.store(v_cache_ptr + place * E + offs_e, v, mask=offs_e < E)


@triton.jit(do_not_specialize=["shared_programs", "own_programs"])  # they follow the batch
def walk_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, part_out_ptr, part_lse_ptr,
    shared_ptr, num_shared_ptr, own_ptr, num_own_ptr, blocks_ptr, prompt_lengths_ptr, own_lengths_ptr,
    first_positions_ptr, stride_qb, stride_qh, softmax_scale, softcap, window, shared_programs, own_programs,
    D: tl.constexpr, E: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SPLIT_KEYS: tl.constexpr, SHARED_ROWS: tl.constexpr, OWN_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Both walks at once: programs of prompts, which take longer, come first, those of own tokens beside them."""
    program = tl.program_id(1)
    if program < shared_programs:
        _walk(
            q_ptr, k_cache_ptr, v_cache_ptr, part_out_ptr, part_lse_ptr,
            shared_ptr, num_shared_ptr, blocks_ptr, prompt_lengths_ptr, own_lengths_ptr, first_positions_ptr,
            stride_qb, stride_qh, softmax_scale, softcap, window, program, shared_programs,
            D, E, NUM_KV_HEADS, GROUP, NUM_SLOTS, BLOCK_TOKENS, SPLIT_KEYS, SHARED_ROWS, BLOCK_D, BLOCK_E,
            HAS_SOFTCAP, HAS_WINDOW, False, UPCAST,
        )  # fmt: skip
    else:
        _walk(
            q_ptr, k_cache_ptr, v_cache_ptr, part_out_ptr, part_lse_ptr,
            own_ptr, num_own_ptr, blocks_ptr, own_lengths_ptr, own_lengths_ptr, first_positions_ptr,
            stride_qb, stride_qh, softmax_scale, softcap, window, program - shared_programs, own_programs,
            D, E, NUM_KV_HEADS, GROUP, NUM_SLOTS, BLOCK_TOKENS, SPLIT_KEYS, OWN_ROWS, BLOCK_D, BLOCK_E,
            HAS_SOFTCAP, HAS_WINDOW, True, UPCAST,
        )  # fmt: skip


@triton.jit
def _walk(
    q_ptr, k_cache_ptr, v_cache_ptr, part_out_ptr, part_lse_ptr,
    items_ptr, num_items_ptr, blocks_ptr, lengths_ptr, own_lengths_ptr, first_positions_ptr,
    stride_qb, stride_qh, softmax_scale, softcap, window, program, num_programs,
    D: tl.constexpr, E: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SPLIT_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_OWN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A program takes every `num_programs`-th item of one key head: a split's keys for all query heads of members."""
    kv_head = tl.program_id(0)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_TOKENS)
    offs_d, offs_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    head = kv_head * GROUP + offs_m % GROUP  # [M]
    factor = 1.0 if HAS_SOFTCAP else softmax_scale
    for item in range(program, tl.load(num_items_ptr), num_programs):
        fields = items_ptr + item * 6
        first_member, num_members = tl.load(fields), tl.load(fields + 1)
        table, first_key = tl.load(fields + 2), tl.load(fields + 3)
        owner, slot = tl.load(fields + 4), tl.load(fields + 5)
        length = tl.load(lengths_ptr + owner)
        # Of the key at 0 of the item's table. A prompt begins at 0.
        first_position = tl.load(first_positions_ptr + owner) if IS_OWN else 0
        is_row = offs_m < num_members * GROUP
        row = tl.where(is_row, first_member + offs_m // GROUP, 0)  # [M]
        # The position of the new token, which reads.
        position = tl.load(first_positions_ptr + row) + tl.load(own_lengths_ptr + row) - 1
        q_ptrs = q_ptr + row.to(tl.int64)[:, None] * stride_qb + head[:, None] * stride_qh + offs_d[None, :]
        q = tl.load(q_ptrs, mask=is_row[:, None] & (offs_d < D)[None, :], other=0.0)
        highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        excess = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for key in range(first_key, tl.minimum(first_key + SPLIT_KEYS, length), BLOCK_TOKENS):
            block = tl.load(blocks_ptr + table + key // BLOCK_TOKENS)
            place = (wide(block) * NUM_KV_HEADS + kv_head) * BLOCK_TOKENS + offs_n  # [N]
            keys = key + offs_n
            is_key = keys < length
            k_mask = is_key[:, None] & (offs_d < D)[None, :]
            k = tl.load(k_cache_ptr + place[:, None] * D + offs_d[None, :], mask=k_mask, other=0.0)
            products = dot(q, tl.trans(k), UPCAST)  # [M, N]
            is_read = is_key[None, :] & is_row[:, None]
            if HAS_WINDOW:
                is_read &= position[:, None] - (first_position + keys)[None, :] < window
            if HAS_SOFTCAP:
                products = cap_scores(products * softmax_scale, softcap)
            # Capped here, for what is not read must be at -inf behind the cap.
            products = tl.where(is_read, products, -float("inf"))
            probs, shrink, highest, total, excess = weigh(
                products, highest, total, excess, factor, softcap, v_cache_ptr.dtype.element_ty, False, True
            )
            v_mask = is_key[:, None] & (offs_e < E)[None, :]
            v = tl.load(v_cache_ptr + place[:, None] * E + offs_e[None, :], mask=v_mask, other=0.0)
            out = dot(probs, v, UPCAST, out * shrink[:, None])
        has_key = total > 0.0
        lse = tl.where(has_key, highest * factor + tl.log2(tl.where(has_key, total, 1.0)) * LN2, -float("inf"))
        out = out / tl.where(has_key, total + excess, 1.0)[:, None]
        part = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * NUM_SLOTS + slot  # [M]
        tl.store(part_lse_ptr + part, lse, mask=is_row)
        out_mask = is_row[:, None] & (offs_e < E)[None, :]
        tl.store(part_out_ptr + part[:, None] * E + offs_e[None, :], out, mask=out_mask)


@triton.jit
def join_kernel(
    part_out_ptr, part_lse_ptr, sinks_ptr, out_ptr, num_slots_ptr, stride_ob, stride_oh,
    E: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One row and head: the mean of its slots, by their sums of weights. A row without slots is padding and gets 0."""
    row, head = tl.program_id(0), tl.program_id(1)
    num_slots = tl.load(num_slots_ptr + row)
    offs_s, offs_e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_E)
    first = (wide(row) * NUM_HEADS + head) * NUM_SLOTS
    lse = tl.load(part_lse_ptr + first + offs_s, mask=offs_s < num_slots, other=-float("inf"))  # [S]
    highest = tl.max(lse, axis=0)
    if HAS_SINKS:
        highest = tl.maximum(highest, tl.load(sinks_ptr + head).to(tl.float32))
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2((lse - highest) * LOG2E)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2((tl.load(sinks_ptr + head).to(tl.float32) - highest) * LOG2E)
    mask = (weights > 0.0)[:, None] & (offs_e < E)[None, :]
    parts = tl.load(part_out_ptr + (first + offs_s)[:, None] * E + offs_e[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + wide(row) * stride_ob + head * stride_oh + offs_e
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_e < E)
