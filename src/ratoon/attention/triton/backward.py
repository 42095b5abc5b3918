"""The backward kernels: a program owns a tile of keys or a tile of rows, and writes its gradient once.

Keys: every row that reads a tile of keys lies in a short list of intervals, so that dK and dV are summed in
registers, over the query heads of the key head too, and written once: no atomics, the same sums in every run.
Rows: dQ as in the forward pass. Both kinds are programs of one launch, the expensive ones first.
"""

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim,
# M rows of a tile, N keys of a tile.

import triton
import triton.language as tl

from ratoon.attention.triton.scores import LOG2E, cap_scores, dot, is_read, load_tile, store_tile, wide
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def row_terms_kernel(
    out_ptr, dout_ptr, lse_ptr, lse2_ptr, means_ptr,
    stride_ot, stride_oh, stride_gt, stride_gh, stride_lh, stride_mh,
    T, num_heads, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the backward pass needs of each row, once: [H, T] of log-sum-exps in base 2, and of means.

    means[h, t] = out[t, h] . dout[t, h] is what the softmax takes off every score's gradient
    (FlashAttention-2, algorithm 2, D).
    """
    # Heads are the fast index: programs that run at the same time read one stretch of memory.
    head = wide(tl.program_id(0) % num_heads)
    offs_m = tl.arange(0, BLOCK_M)
    offs_e = tl.arange(0, BLOCK_E)
    first_row = wide(tl.program_id(0) // num_heads) * BLOCK_M
    mask_m = first_row + offs_m < T
    mask = mask_m[:, None] & (offs_e < E)[None, :]
    out_ptrs = out_ptr + first_row * stride_ot + head * stride_oh + offs_m[:, None] * stride_ot + offs_e[None, :]
    dout_ptrs = dout_ptr + first_row * stride_gt + head * stride_gh + offs_m[:, None] * stride_gt + offs_e[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)  # [M, E]
    dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head * stride_lh + first_row + offs_m, mask=mask_m, other=0.0)
    of_rows = head * stride_mh + first_row + offs_m
    tl.store(means_ptr + of_rows, tl.sum(out * dout, axis=1), mask=mask_m)
    tl.store(lse2_ptr + of_rows, lse * LOG2E, mask=mask_m)


@triton.jit
def score_gradients(
    products, dprobs, lse2, means, allowed,
    softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """probs, and the gradient of scaled scores, from products q.k and dout.v; any shape."""
    scores = products
    factor = softmax_scale * LOG2E
    if HAS_SOFTCAP:
        scores = cap_scores(products * softmax_scale, softcap)
        factor = LOG2E
    probs = tl.exp2(scores * factor - lse2)
    if IS_PARTIAL:  # also where a row without keys has no log-sum-exp
        probs = tl.where(allowed, probs, 0.0)
    dscores = probs * (dprobs - means)
    if HAS_SOFTCAP:
        dscores = dscores * (1.0 - (scores / softcap) * (scores / softcap))
    return probs, dscores


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def backward_kernel(
    q_item_desc, dout_item_desc, k_item_desc, v_item_desc, dk_desc, dv_desc,
    q_row_desc, dout_row_desc, k_row_desc, v_row_desc, dq_desc,
    lse2_ptr, means_ptr, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    work_ptr, item_tile_ptr, item_slot_ptr, item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
    item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_items, num_tiles, num_kv_heads, softmax_scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ITEM_M: tl.constexpr, ITEM_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Programs [0, items * Hkv) own tiles of ITEM_N keys; the others own tiles of BLOCK_M rows."""
    program = tl.program_id(0)
    num_item_programs = num_items * num_kv_heads
    if program < num_item_programs:
        work = tl.load(work_ptr + program)
        key_gradients(
            q_item_desc, dout_item_desc, k_item_desc, v_item_desc, dk_desc, dv_desc,
            lse2_ptr, means_ptr, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
            item_tile_ptr, item_slot_ptr, item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
            item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr, stride_lh,
            work // num_kv_heads, work % num_kv_heads, num_kv_heads, T, softmax_scale, softcap, window,
            GROUP, D, E, BLOCK_D, BLOCK_E, ITEM_M, ITEM_N, HAS_SOFTCAP, HAS_WINDOW, UPCAST,
        )  # fmt: skip
    else:
        # Heads are the slow index: programs that run at the same time read the same keys.
        rank = program - num_item_programs
        query_gradients(
            q_row_desc, dout_row_desc, k_row_desc, v_row_desc, dq_desc,
            lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
            full_offsets_ptr, full_start_ptr, full_end_ptr,
            partial_offsets_ptr, partial_start_ptr, partial_end_ptr, stride_lh,
            tl.load(tile_ptr + rank % num_tiles), rank // num_tiles, T, softmax_scale, softcap, window,
            GROUP, BLOCK_D, BLOCK_E, BLOCK_M, BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, UPCAST,
        )  # fmt: skip


@triton.jit
def key_gradients(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc,
    lse2_ptr, means_ptr, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    tile_ptr, slot_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr, stride_lh,
    item, kv_head, num_kv_heads, T, softmax_scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    tile = tl.load(tile_ptr + item)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    k = load_tile(k_desc, tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
    v = load_tile(v_desc, tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)

    # Scores are computed as [N, M], so that probs and dscores are left operands straight from registers.
    for interval in range(tl.load(full_offsets_ptr + item), tl.load(full_offsets_ptr + item + 1)):
        start = tl.load(full_start_ptr + interval)
        length = tl.load(full_end_ptr + interval) - start
        # One loop over heads and rows: the loads of the next head's first rows overlap too.
        for step in range(0, GROUP * length):
            head = kv_head * GROUP + step // length
            first_row = (start + step % length) * BLOCK_M
            q = load_tile(q_desc, first_row, head, BLOCK_M, BLOCK_D)
            dout = load_tile(dout_desc, first_row, head, BLOCK_M, BLOCK_E)
            of_rows = wide(head) * stride_lh + first_row + offs_m
            lse2 = tl.load(lse2_ptr + of_rows)
            means = tl.load(means_ptr + of_rows)
            products = dot(k, tl.trans(q), UPCAST)  # [N, M]
            dprobs = dot(v, tl.trans(dout), UPCAST)
            probs, dscores = score_gradients(
                products, dprobs, lse2[None, :], means[None, :], True, softmax_scale, softcap, HAS_SOFTCAP, False
            )
            dv = dot(probs.to(dout.dtype), dout, UPCAST, dv)
            dk = dot(dscores.to(q.dtype), q, UPCAST, dk)

    expiry = tl.load(expiry_ptr + keys, mask=keys < T, other=0)
    key_positions = tl.load(positions_ptr + keys, mask=keys < T, other=0) if HAS_WINDOW else keys
    for interval in range(tl.load(partial_offsets_ptr + item), tl.load(partial_offsets_ptr + item + 1)):
        start = tl.load(partial_start_ptr + interval)
        length = tl.load(partial_end_ptr + interval) - start
        for step in range(0, GROUP * length):
            head = kv_head * GROUP + step // length
            first_row = (start + step % length) * BLOCK_M
            rows = first_row + offs_m
            q = load_tile(q_desc, first_row, head, BLOCK_M, BLOCK_D)
            dout = load_tile(dout_desc, first_row, head, BLOCK_M, BLOCK_E)
            lse2 = tl.load(lse2_ptr + wide(head) * stride_lh + rows, mask=rows < T, other=0.0)
            means = tl.load(means_ptr + wide(head) * stride_lh + rows, mask=rows < T, other=0.0)
            row_positions = tl.load(positions_ptr + rows, mask=rows < T, other=0) if HAS_WINDOW else rows
            allowed = is_read(
                rows[None, :], keys[:, None], expiry[:, None],
                row_positions[None, :], key_positions[:, None], window, HAS_WINDOW,
            )  # fmt: skip
            products = dot(k, tl.trans(q), UPCAST)
            dprobs = dot(v, tl.trans(dout), UPCAST)
            probs, dscores = score_gradients(
                products, dprobs, lse2[None, :], means[None, :], allowed, softmax_scale, softcap, HAS_SOFTCAP, True
            )
            dv = dot(probs.to(dout.dtype), dout, UPCAST, dv)
            dk = dot(dscores.to(q.dtype), q, UPCAST, dk)

    dk = dk * softmax_scale
    slot = tl.load(slot_ptr + item)
    if slot < 0:
        store_tile(dk_desc, tile * BLOCK_N, kv_head, dk, BLOCK_N, BLOCK_D)
        store_tile(dv_desc, tile * BLOCK_N, kv_head, dv, BLOCK_N, BLOCK_E)
    else:
        part = (wide(slot) * num_kv_heads + kv_head) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        offs_e = tl.arange(0, BLOCK_E)
        tl.store(dk_parts_ptr + part[:, None] * D + offs_d[None, :], dk, mask=(offs_d < D)[None, :])
        tl.store(dv_parts_ptr + part[:, None] * E + offs_e[None, :], dv, mask=(offs_e < E)[None, :])


@triton.jit
def query_gradients(
    q_desc, dout_desc, k_desc, v_desc, dq_desc,
    lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr, stride_lh,
    tile, head, T, softmax_scale, softcap, window,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    offs_n = tl.arange(0, BLOCK_N)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    kv_head = head // GROUP
    q = load_tile(q_desc, tile * BLOCK_M, head, BLOCK_M, BLOCK_D)
    dout = load_tile(dout_desc, tile * BLOCK_M, head, BLOCK_M, BLOCK_E)
    lse2 = tl.load(lse2_ptr + wide(head) * stride_lh + rows, mask=rows < T, other=0.0)
    means = tl.load(means_ptr + wide(head) * stride_lh + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for interval in range(tl.load(full_offsets_ptr + tile), tl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(tl.load(full_start_ptr + interval), tl.load(full_end_ptr + interval)):
            k = load_tile(k_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
            v = load_tile(v_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
            products = dot(q, tl.trans(k), UPCAST)  # [M, N]
            dprobs = dot(dout, tl.trans(v), UPCAST)
            _, dscores = score_gradients(
                products, dprobs, lse2[:, None], means[:, None], True, softmax_scale, softcap, HAS_SOFTCAP, False
            )
            dq = dot(dscores.to(k.dtype), k, UPCAST, dq)

    row_positions = tl.load(positions_ptr + rows, mask=rows < T, other=0) if HAS_WINDOW else rows
    for interval in range(tl.load(partial_offsets_ptr + tile), tl.load(partial_offsets_ptr + tile + 1)):
        for key_tile in range(tl.load(partial_start_ptr + interval), tl.load(partial_end_ptr + interval)):
            keys = key_tile * BLOCK_N + offs_n
            k = load_tile(k_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_D)
            v = load_tile(v_desc, key_tile * BLOCK_N, kv_head, BLOCK_N, BLOCK_E)
            expiry = tl.load(expiry_ptr + keys, mask=keys < T, other=0)
            key_positions = tl.load(positions_ptr + keys, mask=keys < T, other=0) if HAS_WINDOW else keys
            allowed = is_read(
                rows[:, None], keys[None, :], expiry[None, :],
                row_positions[:, None], key_positions[None, :], window, HAS_WINDOW,
            )  # fmt: skip
            products = dot(q, tl.trans(k), UPCAST)
            dprobs = dot(dout, tl.trans(v), UPCAST)
            _, dscores = score_gradients(
                products, dprobs, lse2[:, None], means[:, None], allowed, softmax_scale, softcap, HAS_SOFTCAP, True
            )
            dq = dot(dscores.to(k.dtype), k, UPCAST, dq)

    store_tile(dq_desc, tile * BLOCK_M, head, dq * softmax_scale, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=FOLLOWS_LAYOUT)
def add_parts_kernel(
    parts_ptr, grad_ptr, split_tile_ptr, split_slots_ptr,
    stride_gt, stride_gh, T, num_kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A split tile's gradient: its parts [slot, Hkv, N, D], added in the order of their slots."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    tile = tl.load(split_tile_ptr + split)
    keys = tile * BLOCK_N + offs_n
    mask = (keys < T)[:, None] & (offs_d < D)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for slot in range(tl.load(split_slots_ptr + split), tl.load(split_slots_ptr + split + 1)):
        part = (wide(slot) * num_kv_heads + kv_head) * BLOCK_N
        total += tl.load(parts_ptr + (part + offs_n[:, None]) * D + offs_d[None, :], mask=mask, other=0.0)
    grad_ptrs = grad_ptr + keys.to(tl.int64)[:, None] * stride_gt + kv_head * stride_gh + offs_d[None, :]
    tl.store(grad_ptrs, total.to(grad_ptr.dtype.element_ty), mask=mask)
