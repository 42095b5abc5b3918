"""dK and dV of wide heads: two groups share 64 keys, because dK and dV of more do not fit into one group's registers.

One group computes probabilities and sums dV; it leaves the probabilities in shared memory for the other, which
computes their gradients and sums dK. No product is computed twice, and each group has half of them.
"""

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

from ratoon.attention.triton.hopper.keys import copy_visiting_rows, probabilities
from ratoon.attention.triton.hopper.warps import NUM_GROUPS, allocate, barriers, matrix, matrix_in_loop
from ratoon.attention.triton.scores import LOG2E


@gluon.jit
def copy_for_shared_keys(
    q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
    q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, kv_head,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: keys for one group and values for the other, then rows of every head for both."""
    mbarrier.expect(own_ready.index(0), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [tile * BLOCK_N, kv_head, 0], own_ready.index(0), k_smem.index(0))
    mbarrier.expect(own_ready.index(1), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [tile * BLOCK_N, kv_head, 0], own_ready.index(1), v_smem.index(0))
    count = copy_visiting_rows(
        q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
        item, kv_head, gl.to_tensor(0), GROUP, BLOCK_M, NUM_STAGES,
    )  # fmt: skip
    copy_visiting_rows(
        q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item, kv_head, count, GROUP, BLOCK_M, NUM_STAGES,
    )  # fmt: skip


@gluon.jit
def add_values(
    k_smem, q_smem, dout_smem, lse2_smem, probs_smem, ready, free, probs_ready, probs_free, dv, count,
    offsets_ptr, start_ptr, end_ptr, item, keys, lifetime, key_positions, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr, IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Adds one list of row tiles to dV [N, D], and leaves each tile's probabilities for the other group."""
    for interval in range(gl.load(offsets_ptr + item), gl.load(offsets_ptr + item + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        for step in range(0, GROUP * length):
            stage = count % NUM_STAGES
            mbarrier.wait(ready.index(stage), (count // NUM_STAGES) & 1)
            q, dout = matrix(q_smem, stage), matrix(dout_smem, stage)
            none = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, PRODUCTS)
            products = warpgroup_mma(
                matrix_in_loop(k_smem, 0, count), q.permute([1, 0]), none, use_acc=False, is_async=True
            )
            lse2 = lse2_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, PRODUCTS))
            products = warpgroup_mma_wait(0, deps=[products])
            probs = probabilities(
                products, lse2, (start + step % length) * BLOCK_M, keys, lifetime, key_positions, positions_ptr,
                T, factor, window, PRODUCTS, BLOCK_M, IS_PARTIAL, HAS_WINDOW,
            )  # fmt: skip
            probs16 = gl.convert_layout(probs.to(q_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
            dv = warpgroup_mma(probs16, dout, dv, is_async=True)
            mbarrier.wait(probs_free.index(0), (count & 1) ^ 1)
            probs_smem.store(probs)
            mbarrier.arrive(probs_ready.index(0))
            dv, _ = warpgroup_mma_wait(0, deps=[dv, probs16])
            mbarrier.arrive(free.index(stage))
            count += 1
    return dv, count


@gluon.jit
def add_keys(
    v_smem, q_smem, dout_smem, means_smem, probs_smem, ready, free, probs_ready, probs_free, dk, count,
    offsets_ptr, start_ptr, end_ptr, item,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Adds one list of row tiles to dK [N, D], from the other group's probabilities."""
    for interval in range(gl.load(offsets_ptr + item), gl.load(offsets_ptr + item + 1)):
        length = gl.load(end_ptr + interval) - gl.load(start_ptr + interval)
        for _ in range(0, GROUP * length):
            stage = count % NUM_STAGES
            mbarrier.wait(ready.index(stage), (count // NUM_STAGES) & 1)
            q, dout = matrix(q_smem, stage), matrix(dout_smem, stage)
            none = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, PRODUCTS)
            dprobs = warpgroup_mma(
                matrix_in_loop(v_smem, 0, count), dout.permute([1, 0]), none, use_acc=False, is_async=True
            )
            means = means_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, PRODUCTS))
            mbarrier.wait(probs_ready.index(0), count & 1)
            probs = probs_smem.load(PRODUCTS)
            mbarrier.arrive(probs_free.index(0))
            dprobs = warpgroup_mma_wait(0, deps=[dprobs])
            dscores = probs * (dprobs - means[None, :])
            dscores16 = gl.convert_layout(dscores.to(q_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
            dk = warpgroup_mma(dscores16, q, dk, is_async=True)
            dk, _ = warpgroup_mma_wait(0, deps=[dk, dscores16])
            mbarrier.arrive(free.index(stage))
            count += 1
    return dk, count


@gluon.jit
def store_gradient(
    grad, desc, spent_smem, parts_ptr, first_key, slot, kv_head, num_kv_heads,
    D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, GRADS: gl.constexpr,
):  # fmt: skip
    """[N, D] to its tensor by way of memory that the group has no more use for, or to its place among the parts."""
    if slot < 0:
        matrix(spent_smem, 0).store(grad.to(spent_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [first_key, kv_head, 0], spent_smem.index(0))
        tma.store_wait(0)
    else:
        part = (slot.to(gl.int64) * num_kv_heads + kv_head) * BLOCK_N
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, GRADS))
        offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, GRADS))
        gl.store(parts_ptr + (part + offs_n)[:, None] * D + offs_d[None, :], grad, mask=(offs_d < D)[None, :])


@gluon.jit
def value_gradients(
    dv_desc, dv_parts_ptr, expiry_ptr, positions_ptr,
    q_smem, dout_smem, k_smem, lse2_smem, probs_smem, own_ready, ready, free, probs_ready, probs_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PRODUCTS))
    lifetime = gl.maximum(gl.load(expiry_ptr + keys, mask=keys < T, other=0) - keys, 0)
    key_positions = keys
    if HAS_WINDOW:
        key_positions = gl.load(positions_ptr + keys, mask=keys < T, other=0)
    factor = softmax_scale * LOG2E
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    mbarrier.wait(own_ready.index(0), 0)
    dv, count = add_values(
        k_smem, q_smem, dout_smem, lse2_smem, probs_smem, ready, free, probs_ready, probs_free, dv, gl.to_tensor(0),
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, item, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, True, HAS_WINDOW,
    )  # fmt: skip
    dv, count = add_values(
        k_smem, q_smem, dout_smem, lse2_smem, probs_smem, ready, free, probs_ready, probs_free, dv, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, False, HAS_WINDOW,
    )  # fmt: skip
    store_gradient(
        dv, dv_desc, k_smem, dv_parts_ptr, tile * BLOCK_N, slot, kv_head, num_kv_heads, D, BLOCK_N, BLOCK_D, GRADS
    )


@gluon.jit
def key_gradients(
    dk_desc, dk_parts_ptr,
    q_smem, dout_smem, v_smem, means_smem, probs_smem, own_ready, ready, free, probs_ready, probs_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, softmax_scale,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    mbarrier.wait(own_ready.index(1), 0)
    dk, count = add_keys(
        v_smem, q_smem, dout_smem, means_smem, probs_smem, ready, free, probs_ready, probs_free, dk, gl.to_tensor(0),
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, item,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES,
    )  # fmt: skip
    dk, count = add_keys(
        v_smem, q_smem, dout_smem, means_smem, probs_smem, ready, free, probs_ready, probs_free, dk, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES,
    )  # fmt: skip
    store_gradient(
        dk * softmax_scale, dk_desc, v_smem, dk_parts_ptr, tile * BLOCK_N, slot, kv_head, num_kv_heads,
        D, BLOCK_N, BLOCK_D, GRADS,
    )  # fmt: skip


@gluon.jit
def own_keys_by_role(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, lse2_desc, means_desc,
    dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    q_smem, dout_smem = allocate(q_desc, NUM_STAGES), allocate(dout_desc, NUM_STAGES)
    k_smem, v_smem = allocate(k_desc, 1), allocate(v_desc, 1)
    lse2_smem, means_smem = allocate(lse2_desc, NUM_STAGES), allocate(means_desc, NUM_STAGES)
    # Both groups hold probabilities alike, so that any order in memory that has no conflicts will do.
    probs_smem = gl.allocate_shared_memory(
        gl.float32, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    )
    own_ready, ready, free = barriers(NUM_GROUPS, 1), barriers(NUM_STAGES, 1), barriers(NUM_STAGES, NUM_GROUPS)
    probs_ready, probs_free = barriers(1, 1), barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (value_gradients, (
                dv_desc, dv_parts_ptr, expiry_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, lse2_smem, probs_smem, own_ready, ready, free, probs_ready, probs_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, HAS_WINDOW,
            )),
            (key_gradients, (
                dk_desc, dk_parts_ptr,
                q_smem, dout_smem, v_smem, means_smem, probs_smem, own_ready, ready, free, probs_ready, probs_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, softmax_scale,
                GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES,
            )),
            (copy_for_shared_keys, (
                q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, kv_head, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
