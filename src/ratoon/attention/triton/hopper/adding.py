"""The backward kernel that adds: a program owns 128 keys, and adds what they give dQ to a sum in global memory.

No product is made twice: five a pair of tiles, where owning rows too (`backward.py`) takes seven. The price is that
programs add to a row in no fixed order.

Two groups of four warps own 64 keys each and keep dK and dV in registers. What a tile of rows gets of all 128 keys is
one product over them, so each group leaves its score gradients in shared memory and computes one half of the tile's
dQ: half of the columns of a head of 128, half of the rows of a head of 64. It does so a turn later, when the
other group's gradients are there already: the groups may be a turn apart, and one's products run while the other
takes exponentials.

Rows visit from their end, which the items of a segment have in common: every head of a tile, then the tile before it.
The copying warp and both groups follow that order.
"""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, M rows of a tile, N keys of a group.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ratoon.attention.triton.hopper.add_to_global import add_to_global
from ratoon.attention.triton.hopper.keys import copy_own_keys, copy_row_tile, probabilities
from ratoon.attention.triton.hopper.warps import NUM_GROUPS, allocate, barriers, matrix, matrix_in_loop
from ratoon.attention.triton.scores import LOG2E
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT

BLOCK = gl.constexpr(64)
"""Side of the squares that a product for dQ is made of: a group's keys, and half a tile's rows or columns."""


@gluon.jit
def squares(smem, NUM_SQUARES: gl.constexpr):
    """Tiles as [squares, 64, 64]: in memory, rows of a tile follow one another, in blocks of 64 columns."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return smem._reinterpret(smem.dtype, [NUM_SQUARES, BLOCK, BLOCK], layout)


@gluon.jit
def rows_of_tile(smem, stage, part: gl.constexpr, NUM_PARTS: gl.constexpr):
    """[64, D] of a visiting tile; of several parts, when D is 64."""
    if NUM_PARTS == 1:
        rows = matrix(smem, stage)
    else:
        rows = squares(smem, smem.shape[0] * NUM_PARTS).index(stage * NUM_PARTS + part)
    return rows


@gluon.jit
def terms_of_rows(smem, stage, part: gl.constexpr, NUM_PARTS: gl.constexpr, PRODUCTS: gl.constexpr):
    """[64] of what goes with `rows_of_tile`."""
    terms = smem.index(stage).reshape([NUM_PARTS * BLOCK])
    if NUM_PARTS > 1:
        terms = terms.slice(part * BLOCK, BLOCK)
    return terms.load(gl.SliceLayout(0, PRODUCTS))


@gluon.jit
def multiply_keys(
    dscores_smem, dscores_ready, k_squares, count,
    GROUP_INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """The group's half of dQ, [64, 64], of the tile LAG before the count-th: two products in flight."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    slot = count % (2 * LAG)
    mbarrier.wait(dscores_ready.index(slot), (count // (2 * LAG)) & 1)
    dq = gl.zeros([BLOCK, BLOCK], gl.float32, HALF)
    for keys in gl.static_range(NUM_GROUPS):
        # A head of 128 is two squares wide; a tile of rows, for a head of 64, is two squares high.
        of_rows = (slot * NUM_GROUPS + keys) * (BLOCK_M // BLOCK) + GROUP_INDEX * (BLOCK_M // BLOCK - 1)
        of_columns = keys * (BLOCK_D // BLOCK) + GROUP_INDEX * (BLOCK_D // BLOCK - 1)
        dscores = dscores_smem.index(of_rows)
        k = k_squares.index(of_columns + (count >> 31))  # as in `matrix_in_loop`
        dq = warpgroup_mma(dscores.permute([1, 0]), k, dq, use_acc=keys > 0, is_async=True)
    return dq


@gluon.jit
def add_half(dq, dq_desc, dq_smem, place):
    """Adds a half [64, 64] to its place among the sums, in the order in which registers hold it.

    Warps, 8 rows of a product, and lanes come before what a thread holds of them, so that it writes 16 bytes and a
    warp a whole row of memory; `finish_kernel` knows the order.
    """
    by_lane = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    tma.store_wait(0)
    dq_smem.store(by_lane.reshape([2 * BLOCK, BLOCK // 2]))
    fence_async_shared()
    add_to_global(dq_desc, [place * (2 * BLOCK), 0], dq_smem)


@gluon.jit
def add_rows(
    k_smem, v_smem, q_smem, dout_smem, lse2_smem, means_smem, dscores_smem, dq_desc, dq_smem,
    ready, free, dscores_ready, dk, dv, count, last_place, next_place,
    offsets_ptr, start_ptr, end_ptr, item, kv_head, keys, lifetime, key_positions, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, NUM_HEADS,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    NUM_STAGES: gl.constexpr, LAG: gl.constexpr, IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Adds one list of row tiles to dK and dV, [N, D] each, and dQ of tiles up to LAG ago to the sums.

    The order is that of `copy_rows`.
    """
    NUM_PARTS: gl.constexpr = BLOCK_M // BLOCK
    k_squares = squares(k_smem, NUM_GROUPS * (BLOCK_D // BLOCK))
    first_interval = gl.load(offsets_ptr + item)
    for interval in range(gl.load(offsets_ptr + item + 1) - 1, first_interval - 1, -1):
        start = gl.load(start_ptr + interval)
        end = gl.load(end_ptr + interval)
        for step in range(0, GROUP * (end - start)):
            # Of a loop over heads in a loop over tiles the compiler spills registers.
            head = kv_head * GROUP + step % GROUP
            row_tile = end - 1 - step // GROUP
            dq = multiply_keys(
                dscores_smem, dscores_ready, k_squares, count, GROUP_INDEX, BLOCK_M, BLOCK_D, LAG
            )  # fmt: skip
            stage = count % NUM_STAGES
            mbarrier.wait(ready.index(stage), (count // NUM_STAGES) & 1)
            none = gl.zeros([BLOCK_N, BLOCK], gl.float32, PRODUCTS)
            q = rows_of_tile(q_smem, stage, 0, NUM_PARTS)
            k = matrix_in_loop(k_smem, GROUP_INDEX, count)
            products = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(1, deps=[dq])
            add_half(dq, dq_desc, dq_smem, last_place)
            # Nobody reads the slot any more: the other group has left the score gradients of this count, and before
            # that it waited for its products of the slot.
            slot = (count + LAG) % (2 * LAG)
            for part in gl.static_range(NUM_PARTS):
                q = rows_of_tile(q_smem, stage, part, NUM_PARTS)
                dout = rows_of_tile(dout_smem, stage, part, NUM_PARTS)
                dprobs = warpgroup_mma(
                    matrix_in_loop(v_smem, GROUP_INDEX, count), dout.permute([1, 0]), none,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                if part + 1 < NUM_PARTS:
                    next_q = rows_of_tile(q_smem, stage, part + 1, NUM_PARTS)
                    next_products = warpgroup_mma(
                        matrix_in_loop(k_smem, GROUP_INDEX, count), next_q.permute([1, 0]), none,
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                lse2 = terms_of_rows(lse2_smem, stage, part, NUM_PARTS, PRODUCTS)
                products = warpgroup_mma_wait(NUM_PARTS if part == 0 else 3, deps=[products])
                probs = probabilities(
                    products, lse2, row_tile * BLOCK_M + part * BLOCK, keys, lifetime, key_positions, positions_ptr,
                    T, factor, window, PRODUCTS, BLOCK, IS_PARTIAL, HAS_WINDOW,
                )  # fmt: skip
                if part > 0:
                    last_probs16 = probs16  # noqa: F821
                probs16 = gl.convert_layout(probs.to(q_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
                means = terms_of_rows(means_smem, stage, part, NUM_PARTS, PRODUCTS)
                dv = warpgroup_mma(probs16, dout, dv, is_async=True)
                if part == 0:
                    dprobs = warpgroup_mma_wait(NUM_PARTS, deps=[dprobs])
                else:  # until then the last part's products read their left operands
                    dprobs, _, _ = warpgroup_mma_wait(1, deps=[dprobs, last_probs16, dscores16])  # noqa: F821
                dscores = (probs * (dprobs - means[None, :])).to(q_smem.dtype)
                dscores16 = gl.convert_layout(dscores, gl.DotOperandLayout(0, GRADS, 2))
                dk = warpgroup_mma(dscores16, q, dk, is_async=True)
                dscores_smem.index((slot * NUM_GROUPS + GROUP_INDEX) * NUM_PARTS + part).store(dscores)
                if part + 1 < NUM_PARTS:
                    products = next_products
            fence_async_shared()  # the tensor cores read what ordinary stores wrote
            mbarrier.arrive(dscores_ready.index(slot))
            # Nothing may be in flight at the loop's end: the assembler would wait for every product.
            dk, dv, _, _ = warpgroup_mma_wait(0, deps=[dk, dv, probs16, dscores16])
            mbarrier.arrive(free.index(stage))
            place = (row_tile * NUM_HEADS + head) * NUM_GROUPS + GROUP_INDEX
            last_place = next_place if LAG == 2 else place
            next_place = place
            count += 1
    return dk, dv, count, last_place, next_place


@gluon.jit
def gradients_of_keys(
    dk_desc, dv_desc, dq_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, dscores_smem, dq_smem,
    own_ready, ready, free, dscores_ready, keys_spent,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    NUM_STAGES: gl.constexpr, LAG: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 keys, and half of what each tile of rows gets of all 128."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    first_key = tile * (BLOCK_N * NUM_GROUPS) + GROUP_INDEX * BLOCK_N
    keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PRODUCTS))
    lifetime = gl.maximum(gl.load(expiry_ptr + keys, mask=keys < T, other=0) - keys, 0)
    key_positions = keys
    if HAS_WINDOW:
        key_positions = gl.load(positions_ptr + keys, mask=keys < T, other=0)
    factor = softmax_scale * LOG2E
    num_heads = num_kv_heads * GROUP
    half_smem = dq_smem.index(GROUP_INDEX)
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    # Before the first tile there were LAG without score gradients: they add zeros to rows that these keys are.
    count = gl.to_tensor(0)
    first_tile = tile * (BLOCK_N * NUM_GROUPS) // BLOCK_M
    last_place = (first_tile * num_heads + kv_head * GROUP) * NUM_GROUPS + GROUP_INDEX
    next_place = last_place
    none = gl.zeros([BLOCK_N, BLOCK], gl.float32, PRODUCTS).to(q_smem.dtype)
    for lag in gl.static_range(LAG):
        for part in gl.static_range(BLOCK_M // BLOCK):
            dscores_smem.index((lag * NUM_GROUPS + GROUP_INDEX) * (BLOCK_M // BLOCK) + part).store(none)
    fence_async_shared()
    for lag in gl.static_range(LAG):
        mbarrier.arrive(dscores_ready.index(lag))
    for group in gl.static_range(NUM_GROUPS):
        mbarrier.wait(own_ready.index(group), 0)
    dk, dv, count, last_place, next_place = add_rows(
        k_smem, v_smem, q_smem, dout_smem, lse2_smem, means_smem, dscores_smem, dq_desc, half_smem,
        ready, free, dscores_ready, dk, dv, count, last_place, next_place,
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, item, kv_head, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP_INDEX, GROUP, num_heads, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, LAG, True, HAS_WINDOW,
    )  # fmt: skip
    dk, dv, count, last_place, next_place = add_rows(
        k_smem, v_smem, q_smem, dout_smem, lse2_smem, means_smem, dscores_smem, dq_desc, half_smem,
        ready, free, dscores_ready, dk, dv, count, last_place, next_place,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item, kv_head, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP_INDEX, GROUP, num_heads, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, LAG, False, HAS_WINDOW,
    )  # fmt: skip
    k_squares = squares(k_smem, NUM_GROUPS * (BLOCK_D // BLOCK))
    for lag in gl.static_range(LAG):
        dq = multiply_keys(
            dscores_smem, dscores_ready, k_squares, count + lag, GROUP_INDEX, BLOCK_M, BLOCK_D, LAG
        )  # fmt: skip
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_half(dq, dq_desc, half_smem, last_place if lag == 0 else next_place)
    mbarrier.arrive(keys_spent.index(0))
    dk = dk * softmax_scale
    if slot < 0:
        # Keys and values are spent, the keys when both groups are done: their memory takes the gradients.
        matrix(v_smem, GROUP_INDEX).store(dv.to(v_smem.dtype))
        mbarrier.wait(keys_spent.index(0), 0)
        matrix(k_smem, GROUP_INDEX).store(dk.to(k_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [first_key, kv_head, 0], k_smem.index(GROUP_INDEX))
        tma.async_copy_shared_to_global(dv_desc, [first_key, kv_head, 0], v_smem.index(GROUP_INDEX))
    else:
        place = (slot.to(gl.int64) * num_kv_heads + kv_head) * (BLOCK_N * NUM_GROUPS) + GROUP_INDEX * BLOCK_N
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, GRADS))
        offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, GRADS))
        offs = (place + offs_n)[:, None] * D + offs_d[None, :]
        gl.store(dk_parts_ptr + offs, dk, mask=(offs_d < D)[None, :])
        gl.store(dv_parts_ptr + offs, dv, mask=(offs_d < D)[None, :])
    tma.store_wait(0)


@gluon.jit
def copy_rows(
    q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
    offsets_ptr, start_ptr, end_ptr, item, kv_head, count,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of one list, from its end: every head of a tile, then the tile before it."""
    first_interval = gl.load(offsets_ptr + item)
    for interval in range(gl.load(offsets_ptr + item + 1) - 1, first_interval - 1, -1):
        start = gl.load(start_ptr + interval)
        end = gl.load(end_ptr + interval)
        for step in range(0, GROUP * (end - start)):
            head = kv_head * GROUP + step % GROUP
            first_row = (end - 1 - step // GROUP) * BLOCK_M
            copy_row_tile(
                q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
                first_row, head, count, NUM_STAGES,
            )  # fmt: skip
            count += 1
    return count


@gluon.jit
def copy_keys_and_rows(
    q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
    q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, kv_head,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    copy_own_keys(k_desc, v_desc, k_smem, v_smem, own_ready, tile, kv_head, BLOCK_N)
    count = copy_rows(
        q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, item, kv_head, gl.to_tensor(0),
        GROUP, BLOCK_M, NUM_STAGES,
    )  # fmt: skip
    copy_rows(
        q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item, kv_head, count, GROUP, BLOCK_M, NUM_STAGES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=FOLLOWS_LAYOUT)
def adding_kernel(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, dq_desc, lse2_desc, means_desc,
    dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    work_ptr, tile_ptr, slot_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    T, num_kv_heads, softmax_scale, window,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr, LAG: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A program owns an item's keys of one head: BLOCK_N a group."""
    work = gl.load(work_ptr + gl.program_id(0))
    item = work // num_kv_heads
    kv_head = work % num_kv_heads
    tile = gl.load(tile_ptr + item)
    slot = gl.load(slot_ptr + item)
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    q_smem, dout_smem = allocate(q_desc, NUM_STAGES), allocate(dout_desc, NUM_STAGES)
    k_smem, v_smem = allocate(k_desc, NUM_GROUPS), allocate(v_desc, NUM_GROUPS)
    lse2_smem, means_smem = allocate(lse2_desc, NUM_STAGES), allocate(means_desc, NUM_STAGES)
    dscores_smem = gl.allocate_shared_memory(
        k_desc.dtype, [2 * LAG * NUM_GROUPS * (BLOCK_M // BLOCK), BLOCK, BLOCK],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )  # fmt: skip
    dq_smem = allocate(dq_desc, NUM_GROUPS)
    own_ready, ready, free = barriers(NUM_GROUPS, 1), barriers(NUM_STAGES, 1), barriers(NUM_STAGES, NUM_GROUPS)
    dscores_ready, keys_spent = barriers(2 * LAG, NUM_GROUPS), barriers(1, NUM_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (gradients_of_keys, (
                dk_desc, dv_desc, dq_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, dscores_smem, dq_smem,
                own_ready, ready, free, dscores_ready, keys_spent,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                0, GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, LAG, HAS_WINDOW,
            )),
            (gradients_of_keys, (
                dk_desc, dv_desc, dq_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, dscores_smem, dq_smem,
                own_ready, ready, free, dscores_ready, keys_spent,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                1, GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, LAG, HAS_WINDOW,
            )),
            (copy_keys_and_rows, (
                q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, kv_head, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
