"""The forward kernel for Hopper, in Gluon: a warp copies tiles, and two groups of four warps own 64 rows each.

FlashAttention-3's schedule (section 3.2): while the tensor cores multiply probabilities by values, the scores of the
next tile are already queued behind them, and the group weighs the last scores. The two groups drift apart, so
that one multiplies while the other takes exponentials.
"""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, E value head dim,
# M rows of a group, N keys of a tile.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
from ratoon.attention.triton.scores import LN2, LOG2E


@gluon.jit
def copy_tiles(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, kv_head,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: rows once, then keys and values in the order in which the groups read them."""
    for group in gl.static_range(NUM_GROUPS):
        mbarrier.expect(q_ready.index(group), q_desc.block_type.nbytes)
        first_row = tile * (BLOCK_M * NUM_GROUPS) + group * BLOCK_M
        tma.async_copy_global_to_shared(q_desc, [first_row, head, 0], q_ready.index(group), q_smem.index(group))
    count = 0
    for interval in range(gl.load(partial_offsets_ptr + tile), gl.load(partial_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(partial_start_ptr + interval), gl.load(partial_end_ptr + interval)):
            copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
            copy_tile(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
            count += 1
    for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
            copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
            copy_tile(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
            count += 1


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
def weigh(products, highest, total, excess, factor, dtype: gl.constexpr, IS_PARTIAL: gl.constexpr):
    """`weigh` of the portable kernel: probs in dtype, what earlier sums shrink by, highest, total, excess."""
    new_highest = gl.maximum(highest, gl.max(products, axis=1))
    if IS_PARTIAL:
        reference = gl.where(new_highest == -float("inf"), 0.0, new_highest) * factor
    else:
        reference = new_highest * factor
    probs = gl.exp2(products * factor - reference[:, None])
    shrink = gl.exp2(highest * factor - reference)
    rounded = probs.to(dtype)
    excess = excess * shrink
    if IS_PARTIAL:
        excess += gl.sum(rounded.to(gl.float32) - probs, axis=1)
    return rounded, shrink, new_highest, total * shrink + gl.sum(probs, axis=1), excess


@gluon.jit
def start_sums(
    sinks_ptr, head, softmax_scale, SCORES: gl.constexpr, BLOCK_M: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """highest, total and excess [M] before any key; a sink is one that every row has read."""
    highest = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    if HAS_SINKS:
        highest = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
        highest += gl.load(sinks_ptr + head).to(gl.float32) / softmax_scale
        total += 1.0
    return highest, total, gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))


@gluon.jit
def store_lse(lse_ptr, highest, total, excess, rows, head, stride_lh, T, softmax_scale):
    """What outputs are divided by. A row without keys: 1, and log-sum-exp minus infinity."""
    total_or_1 = gl.where(total == 0.0, 1.0, total)
    lse = highest * softmax_scale + gl.log2(total_or_1) * LN2
    gl.store(lse_ptr + head.to(gl.int64) * stride_lh + rows, lse, mask=rows < T)
    return total_or_1 + excess


@gluon.jit
def attend_tile(
    q_smem, own, k_smem, v_smem, k_ready, k_free, v_ready, v_free, count, probs, out, highest, total, excess,
    key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
    SCORES: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Queues this tile's q.k, then the last tile's probs.v behind it; weighs the former while the latter runs."""
    stage = count % NUM_STAGES
    mbarrier.wait(k_ready.index(stage), (count // NUM_STAGES) & 1)
    k = matrix(k_smem, stage)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(matrix_in_loop(q_smem, own, count), k.permute([1, 0]), none, use_acc=False, is_async=True)
    last_stage = (count - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(last_stage), ((count - 1) // NUM_STAGES) & 1)
    v = matrix(v_smem, last_stage)
    out = warpgroup_mma(probs, v, out, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    mbarrier.arrive(k_free.index(stage))
    if IS_PARTIAL:
        products = mask_products(
            products, key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, window, SCORES, BLOCK_N, HAS_WINDOW
        )
    new_probs, shrink, highest, total, excess = weigh(
        products, highest, total, excess, factor, v_smem.dtype, IS_PARTIAL
    )
    new_probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, OUT, 2))
    total = stay_before(total)
    out, _ = warpgroup_mma_wait(0, deps=[out, probs])  # the product reads the old probs until then
    mbarrier.arrive(v_free.index(last_stage))
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return new_probs, out, highest, total, excess


@gluon.jit
def attend_rows(
    out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
    q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, stride_lh, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_E: gl.constexpr,
    NUM_STAGES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 rows against every tile of the list, partial tiles first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_E, 16])
    factor = softmax_scale * LOG2E
    first_row = tile * (BLOCK_M * NUM_GROUPS) + GROUP_INDEX * BLOCK_M
    rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    row_positions = rows
    if HAS_WINDOW:
        row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
    highest, total, excess = start_sums(sinks_ptr, head, softmax_scale, SCORES, BLOCK_M, HAS_SINKS)
    out = gl.zeros([BLOCK_M, BLOCK_E], gl.float32, OUT)

    mbarrier.wait(q_ready.index(GROUP_INDEX), 0)
    q = matrix(q_smem, GROUP_INDEX)

    # The first tile, which is partial: a tile of rows always meets the diagonal.
    first_interval = gl.load(partial_offsets_ptr + tile)
    key_tile = gl.load(partial_start_ptr + first_interval)
    mbarrier.wait(k_ready.index(0), 0)
    k = matrix(k_smem, 0)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(q, k.permute([1, 0]), none, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(k_free.index(0))
    products = mask_products(
        products, key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, window, SCORES, BLOCK_N, HAS_WINDOW
    )
    new_probs, _, highest, total, excess = weigh(products, highest, total, excess, factor, v_smem.dtype, True)
    probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, OUT, 2))

    count = 1
    for interval in range(first_interval, gl.load(partial_offsets_ptr + tile + 1)):
        start = gl.load(partial_start_ptr + interval)
        start = gl.where(interval == first_interval, start + 1, start)
        for key_tile in range(start, gl.load(partial_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, GROUP_INDEX, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                count, probs, out, highest, total, excess,
                key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, NUM_STAGES, True, HAS_WINDOW,
            )  # fmt: skip
            count += 1
    for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, GROUP_INDEX, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                count, probs, out, highest, total, excess,
                key_tile, rows, row_positions, expiry_ptr, positions_ptr, T, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, NUM_STAGES, False, HAS_WINDOW,
            )  # fmt: skip
            count += 1

    last_stage = (count - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(last_stage), ((count - 1) // NUM_STAGES) & 1)
    v = matrix(v_smem, last_stage)
    out = warpgroup_mma(probs, v, out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])

    divisor = store_lse(lse_ptr, highest, total, excess, rows, head, stride_lh, T, softmax_scale)
    out = out / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None]
    # The group's rows of q are spent: their memory takes the output on its way out.
    matrix(q_smem, GROUP_INDEX).store(out.to(q_smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [first_row, head, 0], q_smem.index(GROUP_INDEX))
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_tiles, softmax_scale, window,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A program owns NUM_GROUPS * BLOCK_M rows of one head. The value head dim is the query's."""
    head = gl.program_id(0) // num_tiles
    kv_head = head // GROUP
    tile = gl.load(tile_ptr + gl.program_id(0) % num_tiles)
    BLOCK_E: gl.constexpr = v_desc.block_type.shape[2]

    q_smem, k_smem, v_smem = allocate(q_desc, NUM_GROUPS), allocate(k_desc, NUM_STAGES), allocate(v_desc, NUM_STAGES)
    q_ready, k_ready, v_ready = barriers(NUM_GROUPS, 1), barriers(NUM_STAGES, 1), barriers(NUM_STAGES, 1)
    k_free, v_free = barriers(NUM_STAGES, NUM_GROUPS), barriers(NUM_STAGES, NUM_GROUPS)
    fence_async_shared()

    gl.warp_specialize(
        [
            (attend_rows, (
                out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
                q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, stride_lh, T, softmax_scale, window,
                0, BLOCK_M, BLOCK_N, BLOCK_E, NUM_STAGES, HAS_SINKS, HAS_WINDOW,
            )),
            (attend_rows, (
                out_desc, sinks_ptr, lse_ptr, expiry_ptr, positions_ptr,
                q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, stride_lh, T, softmax_scale, window,
                1, BLOCK_M, BLOCK_N, BLOCK_E, NUM_STAGES, HAS_SINKS, HAS_WINDOW,
            )),
            (copy_tiles, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, kv_head, BLOCK_M, BLOCK_N, NUM_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
