"""The forward kernel for the widest heads: two groups share 64 rows, because their output fills two groups' registers.

One group weighs scores as in forward.py, and sums one half of the output's columns; it leaves each tile's
probabilities, and what earlier sums shrink by, in shared memory for the other, which sums the other half.
"""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E columns of half a value,
# M rows of the groups, N keys of a tile.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ratoon.attention.triton.hopper.forward import start_sums, store_lse, weigh
from ratoon.attention.triton.hopper.warps import (
    NUM_GROUPS,
    allocate,
    barriers,
    copy_tile,
    matrix,
    matrix_in_loop,
    may_read,
    stay_before,
)
from ratoon.attention.triton.scores import LOG2E
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@gluon.jit
def mask_products(
    products, key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, window,
    SCORES: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """`is_read` of scores.py, for products [M, N]."""
    keys = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    expiry = gl.load(expiry_ptr + keys, mask=keys < T, other=0)
    lifetime = gl.maximum(expiry - keys, 0)
    key_positions = keys
    if HAS_WINDOW:
        key_positions = gl.load(positions_ptr + keys, mask=keys < T, other=0)
    allowed = may_read(
        rows[:, None], keys[None, :], lifetime[None, :],
        row_positions[:, None], key_positions[None, :], window, HAS_WINDOW,
    )  # fmt: skip
    return gl.where(allowed, products, -float("inf"))


@gluon.jit
def copy_halves(
    v_desc, v_smem, ready, free, first_key, kv_head, count, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """A tile of values as two tiles of half its columns, one for each group."""
    phase = count & 1
    mbarrier.wait(free.index(0), phase ^ 1)
    mbarrier.expect(ready.index(0), NUM_GROUPS * v_desc.block_type.nbytes)
    for group in gl.static_range(NUM_GROUPS):
        tma.async_copy_global_to_shared(
            v_desc, [first_key, kv_head, group * BLOCK_E], ready.index(0), v_smem.index(group)
        )


@gluon.jit
def copy_tiles(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, kv_head,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """The copying warp. Keys go back after their scores, values after the next scores: one tile of each is enough."""
    mbarrier.expect(q_ready.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [tile * BLOCK_M, head, 0], q_ready.index(0), q_smem.index(0))
    count = 0
    for interval in range(gl.load(partial_offsets_ptr + tile), gl.load(partial_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(partial_start_ptr + interval), gl.load(partial_end_ptr + interval)):
            copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, 1)
            copy_halves(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, BLOCK_E)
            count += 1
    for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
            copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, 1)
            copy_halves(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, BLOCK_E)
            count += 1


@gluon.jit
def hand_over(
    probs, shrink, probs_smem, shrink_smem, probs_ready, probs_free, count,
):  # fmt: skip
    """Leaves the count-th tile's probabilities and factors for the other group, once it has taken the last ones."""
    mbarrier.wait(probs_free.index(0), (count & 1) ^ 1)
    probs_smem.store(probs)
    shrink_smem.store(shrink)
    fence_async_shared()  # the tensor cores read what ordinary stores wrote
    mbarrier.arrive(probs_ready.index(0))


@gluon.jit
def attend_tile(
    q_smem, k_smem, v_smem, probs_smem, shrink_smem, k_ready, k_free, v_ready, v_free, probs_ready, probs_free,
    count, probs, out, highest, total, excess,
    key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
    SCORES: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Queues this tile's q.k, then the last tile's probs.v behind it; weighs the former while the latter runs."""
    mbarrier.wait(k_ready.index(0), count & 1)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(
        matrix_in_loop(q_smem, 0, count), matrix_in_loop(k_smem, 0, count).permute([1, 0]), none,
        use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(v_ready.index(0), (count - 1) & 1)
    out = warpgroup_mma(probs, matrix_in_loop(v_smem, 0, count), out, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    mbarrier.arrive(k_free.index(0))
    if IS_PARTIAL:
        products = mask_products(
            products, key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, window, SCORES, BLOCK_N, HAS_WINDOW
        )
    new_probs, shrink, highest, total, excess = weigh(
        products, highest, total, excess, factor, v_smem.dtype, IS_PARTIAL
    )
    total = stay_before(total)
    out, _ = warpgroup_mma_wait(0, deps=[out, probs])
    mbarrier.arrive(v_free.index(0))
    hand_over(new_probs, shrink, probs_smem, shrink_smem, probs_ready, probs_free, count)
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return gl.convert_layout(new_probs, gl.DotOperandLayout(0, OUT, 2)), out, highest, total, excess


@gluon.jit
def store_half(out, out_desc, v_smem, first_row, head, GROUP_INDEX: gl.constexpr, BLOCK_E: gl.constexpr):
    """By way of the group's half of the values, which are spent."""
    matrix(v_smem, GROUP_INDEX).store(out.to(v_smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first_row, head, GROUP_INDEX * BLOCK_E], v_smem.index(GROUP_INDEX))
    tma.store_wait(0)


@gluon.jit
def weigh_and_attend(
    out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
    q_smem, k_smem, v_smem, probs_smem, shrink_smem, q_ready, k_ready, k_free, v_ready, v_free, probs_ready, probs_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, stride_lh, T, softmax_scale, window,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_E: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The group that weighs: partial tiles first, as in forward.py."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_E, 16])
    factor = softmax_scale * LOG2E
    rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    row_positions = rows
    if HAS_WINDOW:
        row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
    highest, total, excess = start_sums(sinks_ptr, head, softmax_scale, SCORES, BLOCK_M, HAS_SINKS)
    out = gl.zeros([BLOCK_M, BLOCK_E], gl.float32, OUT)
    mbarrier.wait(q_ready.index(0), 0)
    q = matrix(q_smem, 0)

    first_interval = gl.load(partial_offsets_ptr + tile)
    mbarrier.wait(k_ready.index(0), 0)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(q, matrix(k_smem, 0).permute([1, 0]), none, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(k_free.index(0))
    products = mask_products(
        products, gl.load(partial_start_ptr + first_interval), rows, row_positions, expiry_ptr, positions_ptr,
        T, window, SCORES, BLOCK_N, HAS_WINDOW,
    )  # fmt: skip
    new_probs, shrink, highest, total, excess = weigh(products, highest, total, excess, factor, v_smem.dtype, True)
    hand_over(new_probs, shrink, probs_smem, shrink_smem, probs_ready, probs_free, 0)
    probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, OUT, 2))

    count = 1
    for interval in range(first_interval, gl.load(partial_offsets_ptr + tile + 1)):
        start = gl.load(partial_start_ptr + interval)
        start = gl.where(interval == first_interval, start + 1, start)
        for key_tile in range(start, gl.load(partial_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, k_smem, v_smem, probs_smem, shrink_smem,
                k_ready, k_free, v_ready, v_free, probs_ready, probs_free, count, probs, out, highest, total, excess,
                key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, True, HAS_WINDOW,
            )  # fmt: skip
            count += 1
    for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, k_smem, v_smem, probs_smem, shrink_smem,
                k_ready, k_free, v_ready, v_free, probs_ready, probs_free, count, probs, out, highest, total, excess,
                key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, False, HAS_WINDOW,
            )  # fmt: skip
            count += 1
    mbarrier.wait(v_ready.index(0), (count - 1) & 1)
    out = warpgroup_mma(probs, matrix(v_smem, 0), out, is_async=True)
    out, _ = warpgroup_mma_wait(0, deps=[out, probs])

    divisor = store_lse(lse_ptr, highest, total, excess, rows, head, stride_lh, T, softmax_scale)
    # The last factors are those that both halves end with; no probabilities come with them.
    ending = 1.0 / divisor
    mbarrier.wait(probs_free.index(0), (count & 1) ^ 1)
    shrink_smem.store(ending)
    mbarrier.arrive(probs_ready.index(0))
    out = out * gl.convert_layout(ending, gl.SliceLayout(1, OUT))[:, None]
    store_half(out, out_desc, v_smem, tile * BLOCK_M, head, 0, BLOCK_E)


@gluon.jit
def count_tiles(offsets_ptr, start_ptr, end_ptr, tile):
    """Tiles in a list of intervals."""
    count = 0
    for interval in range(gl.load(offsets_ptr + tile), gl.load(offsets_ptr + tile + 1)):
        count += gl.load(end_ptr + interval) - gl.load(start_ptr + interval)
    return count


@gluon.jit
def attend_half(
    out_desc, v_smem, probs_smem, shrink_smem, v_ready, v_free, probs_ready, probs_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head,
    BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """The group that takes probabilities over."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_E, 16])
    out = gl.zeros([BLOCK_M, BLOCK_E], gl.float32, OUT)
    num_partial = count_tiles(partial_offsets_ptr, partial_start_ptr, partial_end_ptr, tile)
    num_tiles = num_partial + count_tiles(full_offsets_ptr, full_start_ptr, full_end_ptr, tile)
    for count in range(0, num_tiles):
        mbarrier.wait(probs_ready.index(0), count & 1)
        out = out * shrink_smem.load(gl.SliceLayout(1, OUT))[:, None]
        mbarrier.wait(v_ready.index(0), count & 1)
        out = warpgroup_mma(probs_smem, matrix_in_loop(v_smem, 1, count), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(probs_free.index(0))
        mbarrier.arrive(v_free.index(0))
    mbarrier.wait(probs_ready.index(0), num_tiles & 1)
    out = out * shrink_smem.load(gl.SliceLayout(1, OUT))[:, None]
    store_half(out, out_desc, v_smem, tile * BLOCK_M, head, 1, BLOCK_E)


@gluon.jit(do_not_specialize=FOLLOWS_LAYOUT)
def forward_wide_kernel(
    q_desc, k_desc, v_desc, out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_tiles, softmax_scale, window,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_M rows of one head. Descriptors of values and outputs have half their columns."""
    head = gl.program_id(0) // num_tiles
    kv_head = head // GROUP
    tile = gl.load(tile_ptr + gl.program_id(0) % num_tiles)
    BLOCK_E: gl.constexpr = v_desc.block_type.shape[2]

    q_smem, k_smem, v_smem = allocate(q_desc, 1), allocate(k_desc, 1), allocate(v_desc, NUM_GROUPS)
    probs_smem = gl.allocate_shared_memory(
        v_desc.dtype, [BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    )
    shrink_smem = gl.allocate_shared_memory(
        gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    )
    q_ready, k_ready, v_ready, probs_ready = barriers(1, 1), barriers(1, 1), barriers(1, 1), barriers(1, 1)
    k_free, v_free, probs_free = barriers(1, 1), barriers(1, NUM_GROUPS), barriers(1, 1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (weigh_and_attend, (
                out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
                q_smem, k_smem, v_smem, probs_smem, shrink_smem,
                q_ready, k_ready, k_free, v_ready, v_free, probs_ready, probs_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, stride_lh, T, softmax_scale, window,
                BLOCK_M, BLOCK_N, BLOCK_E, HAS_SINKS, HAS_WINDOW,
            )),
            (attend_half, (
                out_desc, v_smem, probs_smem, shrink_smem, v_ready, v_free, probs_ready, probs_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, BLOCK_M, BLOCK_E,
            )),
            (copy_tiles, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, kv_head, BLOCK_M, BLOCK_N, BLOCK_E,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
