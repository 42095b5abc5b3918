"""dQ: two groups own 64 rows each, and every key that they read passes by."""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, M rows of a tile, N keys of a tile.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ratoon.attention.triton.hopper.forward import copy_partial_tile, mask_by_terms
from ratoon.attention.triton.hopper.warps import (
    NUM_GROUPS,
    allocate,
    barriers,
    copy_tile,
    matrix,
    matrix_in_loop,
)
from ratoon.attention.triton.scores import LOG2E


@gluon.jit
def copy_for_rows(
    q_desc, dout_desc, k_desc, v_desc, terms_desc,
    q_smem, dout_smem, k_smem, v_smem, terms_smem, own_ready, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, kv_head,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The copying warp: rows once, then keys and values; beside the keys of partial tiles, what says who reads them."""
    for group in gl.static_range(NUM_GROUPS):
        first_row = tile * (BLOCK_M * NUM_GROUPS) + group * BLOCK_M
        mbarrier.expect(own_ready.index(group), q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [first_row, head, 0], own_ready.index(group), q_smem.index(group))
        tma.async_copy_global_to_shared(dout_desc, [first_row, head, 0], own_ready.index(group), dout_smem.index(group))
    count = copy_visiting_keys(
        k_desc, v_desc, terms_desc, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
        tile, kv_head, gl.to_tensor(0), BLOCK_N, KEY_STAGES, VALUE_STAGES, True, HAS_WINDOW,
    )  # fmt: skip
    copy_visiting_keys(
        k_desc, v_desc, terms_desc, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
        full_offsets_ptr, full_start_ptr, full_end_ptr,
        tile, kv_head, count, BLOCK_N, KEY_STAGES, VALUE_STAGES, False, HAS_WINDOW,
    )  # fmt: skip


@gluon.jit
def copy_visiting_keys(
    k_desc, v_desc, terms_desc, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
    offsets_ptr, start_ptr, end_ptr, tile, kv_head, count,
    BLOCK_N: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    for interval in range(gl.load(offsets_ptr + tile), gl.load(offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(start_ptr + interval), gl.load(end_ptr + interval)):
            if IS_PARTIAL:
                copy_partial_tile(
                    k_desc, terms_desc, k_smem, terms_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count,
                    KEY_STAGES, HAS_WINDOW,
                )  # fmt: skip
            else:
                copy_tile(k_desc, k_smem, k_ready, k_free, key_tile * BLOCK_N, kv_head, count, KEY_STAGES)
            copy_tile(v_desc, v_smem, v_ready, v_free, key_tile * BLOCK_N, kv_head, count, VALUE_STAGES)
            count += 1
    return count


@gluon.jit
def add_keys(
    q_smem, dout_smem, own, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free, dq, count,
    offsets_ptr, start_ptr, end_ptr, tile, rows, row_positions, lse2, means, factor, window,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Adds one list of key tiles to dQ, [M, D]."""
    for interval in range(gl.load(offsets_ptr + tile), gl.load(offsets_ptr + tile + 1)):
        for key_tile in range(gl.load(start_ptr + interval), gl.load(end_ptr + interval)):
            k_stage, v_stage = count % KEY_STAGES, count % VALUE_STAGES
            none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PRODUCTS)
            mbarrier.wait(k_ready.index(k_stage), (count // KEY_STAGES) & 1)
            k = matrix(k_smem, k_stage)
            products = warpgroup_mma(
                matrix_in_loop(q_smem, own, count), k.permute([1, 0]), none, use_acc=False, is_async=True
            )
            mbarrier.wait(v_ready.index(v_stage), (count // VALUE_STAGES) & 1)
            v = matrix(v_smem, v_stage)
            dprobs = warpgroup_mma(
                matrix_in_loop(dout_smem, own, count), v.permute([1, 0]), none, use_acc=False, is_async=True
            )
            products = warpgroup_mma_wait(1, deps=[products])
            exponents = products * factor - lse2[:, None]
            if IS_PARTIAL:  # exponents, because a row without keys has minus infinity for lse2
                exponents = mask_by_terms(
                    exponents, terms_smem, k_stage, key_tile, rows, row_positions, window,
                    PRODUCTS, BLOCK_N, KEY_STAGES, HAS_WINDOW,
                )  # fmt: skip
            probs = gl.exp2(exponents)
            dprobs = warpgroup_mma_wait(0, deps=[dprobs])
            mbarrier.arrive(v_free.index(v_stage))
            dscores = probs * (dprobs - means[:, None])
            dscores16 = gl.convert_layout(dscores.to(k_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
            dq = warpgroup_mma(dscores16, k, dq, is_async=True)
            dq, _ = warpgroup_mma_wait(0, deps=[dq, dscores16])
            mbarrier.arrive(k_free.index(k_stage))
            count += 1
    return dq, count


@gluon.jit
def query_gradients(
    dq_desc, lse2_ptr, means_ptr, positions_ptr,
    q_smem, dout_smem, k_smem, v_smem, terms_smem, own_ready, k_ready, k_free, v_ready, v_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, stride_lh, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 rows."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    first_row = tile * (BLOCK_M * NUM_GROUPS) + GROUP_INDEX * BLOCK_M
    rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, PRODUCTS))
    row_positions = rows
    if HAS_WINDOW:
        row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
    of_rows = head.to(gl.int64) * stride_lh + rows
    lse2 = gl.load(lse2_ptr + of_rows, mask=rows < T, other=0.0)
    means = gl.load(means_ptr + of_rows, mask=rows < T, other=0.0)
    factor = softmax_scale * LOG2E
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, GRADS)
    mbarrier.wait(own_ready.index(GROUP_INDEX), 0)
    dq, count = add_keys(
        q_smem, dout_smem, GROUP_INDEX, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free,
        dq, gl.to_tensor(0), partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
        tile, rows, row_positions, lse2, means, factor, window,
        PRODUCTS, GRADS, BLOCK_M, BLOCK_N, KEY_STAGES, VALUE_STAGES, True, HAS_WINDOW,
    )  # fmt: skip
    dq, count = add_keys(
        q_smem, dout_smem, GROUP_INDEX, k_smem, v_smem, terms_smem, k_ready, k_free, v_ready, v_free, dq, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, tile, rows, row_positions, lse2, means, factor, window,
        PRODUCTS, GRADS, BLOCK_M, BLOCK_N, KEY_STAGES, VALUE_STAGES, False, HAS_WINDOW,
    )  # fmt: skip
    dq = dq * softmax_scale
    matrix(q_smem, GROUP_INDEX).store(dq.to(q_smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dq_desc, [first_row, head, 0], q_smem.index(GROUP_INDEX))
    tma.store_wait(0)


@gluon.jit
def own_rows(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, terms_desc, lse2_ptr, means_ptr, positions_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    tile, head, kv_head, stride_lh, T, softmax_scale, window,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    q_smem, dout_smem = allocate(q_desc, NUM_GROUPS), allocate(dout_desc, NUM_GROUPS)
    k_smem, v_smem = allocate(k_desc, KEY_STAGES), allocate(v_desc, VALUE_STAGES)
    terms_smem = allocate(terms_desc, 2 * KEY_STAGES if HAS_WINDOW else KEY_STAGES)
    own_ready, k_ready, v_ready = barriers(NUM_GROUPS, 1), barriers(KEY_STAGES, 1), barriers(VALUE_STAGES, 1)
    k_free, v_free = barriers(KEY_STAGES, NUM_GROUPS), barriers(VALUE_STAGES, NUM_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (query_gradients, (
                dq_desc, lse2_ptr, means_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, terms_smem, own_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, stride_lh, T, softmax_scale, window,
                0, BLOCK_M, BLOCK_N, BLOCK_D, KEY_STAGES, VALUE_STAGES, HAS_WINDOW,
            )),
            (query_gradients, (
                dq_desc, lse2_ptr, means_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, terms_smem, own_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, stride_lh, T, softmax_scale, window,
                1, BLOCK_M, BLOCK_N, BLOCK_D, KEY_STAGES, VALUE_STAGES, HAS_WINDOW,
            )),
            (copy_for_rows, (
                q_desc, dout_desc, k_desc, v_desc, terms_desc,
                q_smem, dout_smem, k_smem, v_smem, terms_smem, own_ready, k_ready, k_free, v_ready, v_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                tile, head, kv_head, BLOCK_M, BLOCK_N, KEY_STAGES, VALUE_STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
