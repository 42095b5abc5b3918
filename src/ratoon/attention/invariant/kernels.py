"""One walk for all: a tile of rows of one segment reads its ancestors' keys and its own, from first to last.

What a row reads, and in which order, depends on its path alone. Tiles of keys start at multiples of their size from the
start of their segment, tiles of rows at multiples of theirs, which divides it: so all rows of a tile end in one tile of
keys, and a tile that a row reads nothing of comes before all that it reads (the window), where sums are still zero.
"""

# Shape letters: H heads (Hq query, Hkv key and value), D head dim, E value head dim, F blocks of keys,
# M rows of a tile (tokens times query heads of a key head), N keys of a tile.

import triton
import triton.language as tl

from ratoon.attention.triton.scores import LN2, LOG2E, cap_scores, dot

_UNSPECIALISED = (
    "rows_ptr", "counts_ptr", "ends_ptr", "own_table_ptr", "own_position_ptr",
    "offsets_ptr", "table_ptr", "length_ptr", "position_ptr", "blocks_ptr",
    "units_qt", "units_qh", "units_kf", "units_kh", "units_kn", "units_vf", "units_vh", "units_vn",
    "num_rows", "window",
)  # fmt: skip
"""What differs between training and generation: the compiled code must not, so it may not look at their values."""


@triton.jit(do_not_specialize=_UNSPECIALISED)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr,
    rows_ptr, counts_ptr, ends_ptr, own_table_ptr, own_position_ptr,
    offsets_ptr, table_ptr, length_ptr, position_ptr, blocks_ptr,
    units_qt, units_qh, units_kf, units_kh, units_kn, units_vf, units_vh, units_vn,
    num_rows, window, softmax_scale, softcap,
    D: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Strides come in units of UNIT elements, so that loads are known to be aligned. out [T, Hq, E] is contiguous."""
    # int64: head * stride passes 2**31 once T * H * D does
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    count, end = tl.load(counts_ptr + tile), tl.load(ends_ptr + tile)
    own_table, own_position = tl.load(own_table_ptr + tile), tl.load(own_position_ptr + tile)
    first_ancestor, end_ancestor = tl.load(offsets_ptr + tile), tl.load(offsets_ptr + tile + 1)
    is_row = offs_m < count * GROUP
    head = kv_head * GROUP + offs_m % GROUP  # [M]
    row = tl.load(rows_ptr + tile).to(tl.int64) + tl.where(is_row, offs_m // GROUP, 0)  # [M]
    own_index = end - count + offs_m // GROUP
    position = own_position + own_index
    first_position = own_position + end - count

    q_ptrs = q_ptr + row[:, None] * (units_qt * UNIT) + head[:, None] * (units_qh * UNIT) + offs_d[None, :]
    q = tl.load(q_ptrs, mask=is_row[:, None] & (offs_d < D)[None, :], other=0.0)
    factor = LOG2E if HAS_SOFTCAP else softmax_scale * LOG2E
    if HAS_SINKS:  # a key that every row has read already, with value 0
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        highest = sink if HAS_SOFTCAP else sink / softmax_scale
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    # Of the weights as they multiply values, rounded to their dtype: `total` has them exact.
    weight = total
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    for part in range(first_ancestor, end_ancestor + 1):
        is_ancestor = part < end_ancestor
        table = tl.where(is_ancestor, tl.load(table_ptr + part, mask=is_ancestor, other=0), own_table)
        length = tl.where(is_ancestor, tl.load(length_ptr + part, mask=is_ancestor, other=0), end)
        part_position = tl.where(is_ancestor, tl.load(position_ptr + part, mask=is_ancestor, other=0), own_position)
        num_read = tl.where(is_ancestor, length, own_index + 1)  # [M]
        first_key = tl.maximum(first_position - window + 1 - part_position, 0) // BLOCK_N * BLOCK_N
        for key in range(first_key, length, BLOCK_N):
            block = tl.load(blocks_ptr + table + key // BLOCK_TOKENS).to(tl.int64)
            keys = key + offs_n
            places = key % BLOCK_TOKENS + offs_n
            is_key = keys < length
            k_ptrs = k_ptr + block * (units_kf * UNIT) + kv_head * (units_kh * UNIT)
            k_mask = is_key[:, None] & (offs_d < D)[None, :]
            k = tl.load(k_ptrs + places[:, None] * (units_kn * UNIT) + offs_d[None, :], mask=k_mask, other=0.0)
            scores = dot(q, tl.trans(k), UPCAST)  # [M, N]
            if HAS_SOFTCAP:
                scores = cap_scores(scores * softmax_scale, softcap)
            is_read = is_row[:, None] & (keys[None, :] < num_read[:, None])
            is_read &= position[:, None] - (part_position + keys)[None, :] < window
            scores = tl.where(is_read, scores, -float("inf"))

            new_highest = tl.maximum(highest, tl.max(scores, axis=1))
            # A row that has read no key yet has no highest score: any finite one will do.
            finite = tl.where(new_highest == -float("inf"), 0.0, new_highest)
            probs = tl.exp2(scores * factor - (finite * factor)[:, None])
            shrink = tl.where(new_highest == highest, 1.0, tl.exp2((highest - finite) * factor))
            rounded = probs.to(v_ptr.dtype.element_ty)
            total = total * shrink + tl.sum(probs, axis=1)
            weight = weight * shrink + tl.sum(rounded.to(tl.float32), axis=1)
            highest = new_highest
            v_ptrs = v_ptr + block * (units_vf * UNIT) + kv_head * (units_vh * UNIT)
            v_mask = is_key[:, None] & (offs_e < E)[None, :]
            v = tl.load(v_ptrs + places[:, None] * (units_vn * UNIT) + offs_e[None, :], mask=v_mask, other=0.0)
            out = dot(rounded, v, UPCAST, out * shrink[:, None])

    # A row without keys is padding: output 0, log-sum-exp minus infinity.
    has_key = total > 0.0
    out = out / tl.where(has_key, weight, 1.0)[:, None]
    lse = highest * (1.0 if HAS_SOFTCAP else softmax_scale) + tl.log2(tl.where(has_key, total, 1.0)) * LN2
    out_ptrs = out_ptr + (row * num_heads + head)[:, None] * E + offs_e[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (offs_e < E)[None, :])
    tl.store(lse_ptr + head * num_rows + row, lse, mask=is_row)
