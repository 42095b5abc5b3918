"""The forward kernel for Hopper, in Gluon: a warp copies tiles, and two groups of four warps own 64 rows each.

FlashAttention-3's schedule (section 3.2): while the tensor cores multiply probabilities by values, the scores of the
next tile are already queued behind them, and the group weighs the last scores. The two groups drift apart, so
that one multiplies while the other takes exponentials.

Programs are persistent: each walks a list of tiles of rows. Its copying warp is ahead of the groups: the next rows and
their first keys are there when a group has written its last ones.
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
    rounded_in_pairs,
    stay_before,
    where_less,
)
from ratoon.attention.triton.scores import LN2, LOG2E
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@gluon.jit
def copy_rows(
    q_desc, q_smem, q_ready, q_free, tile, head, item, BLOCK_M: gl.constexpr, NUM_ROW_STAGES: gl.constexpr,
):  # fmt: skip
    """The rows of the item-th tile that the program owns."""
    first = item % NUM_ROW_STAGES * NUM_GROUPS
    for group in gl.static_range(NUM_GROUPS):
        mbarrier.wait(q_free.index(first + group), ((item // NUM_ROW_STAGES) & 1) ^ 1)
        mbarrier.expect(q_ready.index(first + group), q_desc.block_type.nbytes)
        first_row = (tile * NUM_GROUPS + group) * BLOCK_M
        tma.async_copy_global_to_shared(
            q_desc, [first_row, head, 0], q_ready.index(first + group), q_smem.index(first + group)
        )


@gluon.jit
def copy_partial_tile(
    k_desc, terms_desc, k_smem, terms_smem, ready, free, first_key, head, count,
    NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """`copy_tile` of keys, with what says who reads them."""
    NUM_TERMS: gl.constexpr = 2 if HAS_WINDOW else 1
    stage = count % NUM_STAGES
    mbarrier.wait(free.index(stage), ((count // NUM_STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), k_desc.block_type.nbytes + NUM_TERMS * terms_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [first_key, head, 0], ready.index(stage), k_smem.index(stage))
    for term in gl.static_range(NUM_TERMS):
        tma.async_copy_global_to_shared(
            terms_desc, [term, first_key], ready.index(stage), terms_smem.index(stage + term * NUM_STAGES)
        )


@gluon.jit
def copy_tiles(
    q_desc, k_desc, v_desc, terms_desc, q_smem, k_smem, v_smem, terms_smem,
    q_ready, q_free, k_ready, k_free, v_ready, v_free,
    work_ptr, work_offsets_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    num_tiles, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    NUM_ROW_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The copying warp: for each piece of work its rows, and keys and values in the order in which groups read them."""
    first_work = gl.load(work_offsets_ptr + gl.program_id(0))
    count = gl.to_tensor(0)
    for index in range(first_work, gl.load(work_offsets_ptr + gl.program_id(0) + 1)):
        work = gl.load(work_ptr + index)
        tile, head = work % num_tiles, work // num_tiles
        kv_head = head // GROUP
        first = count
        for interval in range(gl.load(partial_offsets_ptr + tile), gl.load(partial_offsets_ptr + tile + 1)):
            for key_tile in range(gl.load(partial_start_ptr + interval), gl.load(partial_end_ptr + interval)):
                copy_partial_tile(
                    k_desc, terms_desc, k_smem, terms_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count,
                    NUM_STAGES, HAS_WINDOW,
                )  # fmt: skip
                # The first keys may find their place free before the rows do.
                if count == first:
                    copy_rows(q_desc, q_smem, q_ready, q_free, tile, head, index - first_work, BLOCK_M, NUM_ROW_STAGES)
                copy_tile(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
                count += 1
        for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
            for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
                copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
                copy_tile(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, NUM_STAGES)
                count += 1


@gluon.jit
def mask_by_terms(
    products, terms_smem, stage, key_tile, rows, row_positions, window,
    SCORES: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """`is_read` of scores.py for products [M, N], with lifetimes (and positions) that came with the keys.

    Rows are counted from the tile's first key, so that no difference of a row and a key outlives the tile.
    """
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    rows = rows - key_tile * BLOCK_N
    lifetime = terms_smem.index(stage).reshape([BLOCK_N]).load(gl.SliceLayout(0, SCORES))
    products = where_less(products, rows[:, None] - keys[None, :], lifetime[None, :])
    if HAS_WINDOW:
        key_positions = terms_smem.index(stage + NUM_STAGES).reshape([BLOCK_N]).load(gl.SliceLayout(0, SCORES))
        products = gl.where(row_positions[:, None] - key_positions[None, :] < window, products, -float("inf"))
    return products


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
    tile_total = gl.sum(probs, axis=1)
    if IS_PARTIAL:
        excess += gl.sum(rounded_in_pairs(probs, dtype), axis=1) - tile_total
    return rounded, shrink, new_highest, total * shrink + tile_total, excess


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
    q_smem, row_stage, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
    count, probs, out, highest, total, excess, key_tile, rows, row_positions, factor, window,
    SCORES: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Queues this tile's q.k, then the last tile's probs.v behind it; weighs the former while the latter runs."""
    stage = count % NUM_STAGES
    mbarrier.wait(k_ready.index(stage), (count // NUM_STAGES) & 1)
    q, k = matrix_in_loop(q_smem, row_stage, count), matrix(k_smem, stage)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(q, k.permute([1, 0]), none, use_acc=False, is_async=True)
    last_stage = (count - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(last_stage), ((count - 1) // NUM_STAGES) & 1)
    v = matrix(v_smem, last_stage)
    out = warpgroup_mma(probs, v, out, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    if IS_PARTIAL:
        products = mask_by_terms(
            products, terms_smem, stage, key_tile, rows, row_positions, window, SCORES, BLOCK_N, NUM_STAGES, HAS_WINDOW
        )
    mbarrier.arrive(k_free.index(stage))
    new_probs, shrink, highest, total, excess = weigh(
        products, highest, total, excess, factor, v_smem.dtype, IS_PARTIAL
    )
    # The product reads the old probs until it is waited for.
    new_probs = gl.convert_layout(new_probs, gl.DotOperandLayout(0, OUT, 2))
    total = stay_before(total)
    out, _ = warpgroup_mma_wait(0, deps=[out, probs])
    mbarrier.arrive(v_free.index(last_stage))
    out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    return new_probs, out, highest, total, excess


@gluon.jit
def attend_item(
    sinks_ptr, lse_ptr, positions_ptr, q_smem, k_smem, v_smem, terms_smem,
    q_free, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, item, count, stride_lh, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_E: gl.constexpr,
    NUM_STAGES: gl.constexpr, NUM_ROW_STAGES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """64 rows, which are there, against every tile of their lists, partial ones first: the output [M, E], and count."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_E, 16])
    factor = softmax_scale * LOG2E
    row_stage = item % NUM_ROW_STAGES * NUM_GROUPS + GROUP_INDEX
    # The first tile, which is partial: a tile of rows always meets the diagonal.
    stage = count % NUM_STAGES
    mbarrier.wait(k_ready.index(stage), (count // NUM_STAGES) & 1)
    q, k = matrix_in_loop(q_smem, row_stage, count), matrix(k_smem, stage)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    products = warpgroup_mma(q, k.permute([1, 0]), none, use_acc=False, is_async=True)
    rows = (tile * NUM_GROUPS + GROUP_INDEX) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCORES))
    row_positions = rows
    if HAS_WINDOW:
        row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
    highest, total, excess = start_sums(sinks_ptr, head, softmax_scale, SCORES, BLOCK_M, HAS_SINKS)
    out = gl.zeros([BLOCK_M, BLOCK_E], gl.float32, OUT)
    first_interval = gl.load(partial_offsets_ptr + tile)
    first_tile = gl.load(partial_start_ptr + first_interval)
    if NUM_ROW_STAGES > 1:
        # By now the last output has left, and rows can come where it was.
        tma.store_wait(0)
        if item > 0:
            mbarrier.arrive(q_free.index((item - 1) % NUM_ROW_STAGES * NUM_GROUPS + GROUP_INDEX))
    products = warpgroup_mma_wait(0, deps=[products])
    products = mask_by_terms(
        products, terms_smem, stage, first_tile, rows, row_positions, window, SCORES, BLOCK_N, NUM_STAGES, HAS_WINDOW
    )
    mbarrier.arrive(k_free.index(stage))
    probs, _, highest, total, excess = weigh(products, highest, total, excess, factor, v_smem.dtype, True)
    probs = gl.convert_layout(probs, gl.DotOperandLayout(0, OUT, 2))
    count += 1

    for interval in range(first_interval, gl.load(partial_offsets_ptr + tile + 1)):
        start = gl.load(partial_start_ptr + interval)
        start = gl.where(interval == first_interval, start + 1, start)
        for key_tile in range(start, gl.load(partial_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, row_stage, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
                count, probs, out, highest, total, excess, key_tile, rows, row_positions, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, NUM_STAGES, True, HAS_WINDOW,
            )  # fmt: skip
            count += 1
    for interval in range(gl.load(full_offsets_ptr + tile), gl.load(full_offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(full_start_ptr + interval), gl.load(full_end_ptr + interval)):
            probs, out, highest, total, excess = attend_tile(
                q_smem, row_stage, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
                count, probs, out, highest, total, excess, key_tile, rows, row_positions, factor, window,
                SCORES, OUT, BLOCK_M, BLOCK_N, NUM_STAGES, False, HAS_WINDOW,
            )  # fmt: skip
            count += 1

    last_stage = (count - 1) % NUM_STAGES
    mbarrier.wait(v_ready.index(last_stage), ((count - 1) // NUM_STAGES) & 1)
    out = warpgroup_mma(probs, matrix(v_smem, last_stage), out, is_async=True)
    out, _ = warpgroup_mma_wait(0, deps=[out, probs])
    mbarrier.arrive(v_free.index(last_stage))
    divisor = store_lse(lse_ptr, highest, total, excess, rows, head, stride_lh, T, softmax_scale)
    return out / gl.convert_layout(divisor, gl.SliceLayout(1, OUT))[:, None], count


@gluon.jit
def attend_rows(
    out_desc, sinks_ptr, lse_ptr, positions_ptr, q_smem, k_smem, v_smem, terms_smem,
    q_ready, q_free, k_ready, k_free, v_ready, v_free,
    work_ptr, work_offsets_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    num_tiles, stride_lh, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    NUM_ROW_STAGES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 rows of each tile that the program owns. Outputs leave from where the rows were."""
    BLOCK_E: gl.constexpr = out_desc.block_type.shape[2]
    first_work = gl.load(work_offsets_ptr + gl.program_id(0))
    last_work = gl.load(work_offsets_ptr + gl.program_id(0) + 1)
    count = gl.to_tensor(0)
    next_work = gl.load(work_ptr + first_work, mask=first_work < last_work, other=0)
    for index in range(first_work, last_work):
        item = index - first_work
        tile, head = next_work % num_tiles, next_work // num_tiles
        next_work = gl.load(work_ptr + index + 1, mask=index + 1 < last_work, other=0)
        row_stage = item % NUM_ROW_STAGES * NUM_GROUPS + GROUP_INDEX
        mbarrier.wait(q_ready.index(row_stage), (item // NUM_ROW_STAGES) & 1)
        out, count = attend_item(
            sinks_ptr, lse_ptr, positions_ptr,
            q_smem, k_smem, v_smem, terms_smem, q_free, k_ready, k_free, v_ready, v_free,
            full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
            tile, head, item, count, stride_lh, T, softmax_scale, window,
            GROUP_INDEX, BLOCK_M, BLOCK_N, BLOCK_E, NUM_STAGES, NUM_ROW_STAGES, HAS_SINKS, HAS_WINDOW,
        )  # fmt: skip
        matrix(q_smem, row_stage).store(out.to(q_smem.dtype))
        fence_async_shared()
        first_row = (tile * NUM_GROUPS + GROUP_INDEX) * BLOCK_M
        tma.async_copy_shared_to_global(out_desc, [first_row, head, 0], q_smem.index(row_stage))
        if NUM_ROW_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(GROUP_INDEX))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=FOLLOWS_LAYOUT)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, terms_desc, sinks_ptr, lse_ptr, positions_ptr, work_ptr, work_offsets_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_tiles, softmax_scale, window,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
    NUM_ROW_STAGES: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Program p does pieces of work [offsets[p], offsets[p + 1]): 2 * BLOCK_M rows of one head each.

    Work is head * num_tiles + tile. The value head dim is the query's. NUM_ROW_STAGES: 2 where shared memory has room
    for the next rows beside those that are read; 1: they come once the output has left from there.
    """
    q_smem = allocate(q_desc, NUM_ROW_STAGES * NUM_GROUPS)
    k_smem, v_smem = allocate(k_desc, NUM_STAGES), allocate(v_desc, NUM_STAGES)
    terms_smem = allocate(terms_desc, 2 * NUM_STAGES if HAS_WINDOW else NUM_STAGES)
    q_ready, q_free = barriers(NUM_ROW_STAGES * NUM_GROUPS, 1), barriers(NUM_ROW_STAGES * NUM_GROUPS, 1)
    k_ready, v_ready = barriers(NUM_STAGES, 1), barriers(NUM_STAGES, 1)
    k_free, v_free = barriers(NUM_STAGES, NUM_GROUPS), barriers(NUM_STAGES, NUM_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_rows, (
                out_desc, sinks_ptr, lse_ptr, positions_ptr, q_smem, k_smem, v_smem, terms_smem,
                q_ready, q_free, k_ready, k_free, v_ready, v_free,
                work_ptr, work_offsets_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
                partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                num_tiles, stride_lh, T, softmax_scale, window,
                0, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_ROW_STAGES, HAS_SINKS, HAS_WINDOW,
            )),
            (attend_rows, (
                out_desc, sinks_ptr, lse_ptr, positions_ptr, q_smem, k_smem, v_smem, terms_smem,
                q_ready, q_free, k_ready, k_free, v_ready, v_free,
                work_ptr, work_offsets_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
                partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                num_tiles, stride_lh, T, softmax_scale, window,
                1, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_ROW_STAGES, HAS_SINKS, HAS_WINDOW,
            )),
            (copy_tiles, (
                q_desc, k_desc, v_desc, terms_desc, q_smem, k_smem, v_smem, terms_smem,
                q_ready, q_free, k_ready, k_free, v_ready, v_free,
                work_ptr, work_offsets_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
                partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                num_tiles, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_ROW_STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
