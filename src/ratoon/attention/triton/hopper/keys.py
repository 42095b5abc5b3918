"""dK and dV: two groups own 64 keys each, and every row that reads them passes by."""

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

from ratoon.attention.triton.hopper.warps import (
    NUM_GROUPS,
    allocate,
    barriers,
    matrix,
    matrix_in_loop,
    may_read,
    where_less,
)
from ratoon.attention.triton.scores import LOG2E


@gluon.jit
def copy_row_tile(
    q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
    first_row, head, count, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The count-th visiting tile, and its rows' terms, once the groups have left its stage."""
    stage = count % NUM_STAGES
    mbarrier.wait(free.index(stage), ((count // NUM_STAGES) & 1) ^ 1)
    bar = ready.index(stage)
    num_bytes: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * lse2_desc.block_type.nbytes
    mbarrier.expect(bar, num_bytes)
    tma.async_copy_global_to_shared(q_desc, [first_row, head, 0], bar, q_smem.index(stage))
    tma.async_copy_global_to_shared(lse2_desc, [head, first_row], bar, lse2_smem.index(stage))
    tma.async_copy_global_to_shared(dout_desc, [first_row, head, 0], bar, dout_smem.index(stage))
    tma.async_copy_global_to_shared(means_desc, [head, first_row], bar, means_smem.index(stage))


@gluon.jit
def copy_own_keys(k_desc, v_desc, k_smem, v_smem, own_ready, tile, kv_head, BLOCK_N: gl.constexpr):
    """Keys and values of each group."""
    for group in gl.static_range(NUM_GROUPS):
        first_key = tile * (BLOCK_N * NUM_GROUPS) + group * BLOCK_N
        mbarrier.expect(own_ready.index(group), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [first_key, kv_head, 0], own_ready.index(group), k_smem.index(group))
        tma.async_copy_global_to_shared(v_desc, [first_key, kv_head, 0], own_ready.index(group), v_smem.index(group))


@gluon.jit
def copy_visiting_rows(
    q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
    offsets_ptr, start_ptr, end_ptr, item, kv_head, count,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of one list, head after head."""
    for interval in range(gl.load(offsets_ptr + item), gl.load(offsets_ptr + item + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        for step in range(0, GROUP * length):
            head = kv_head * GROUP + step // length
            first_row = (start + step % length) * BLOCK_M
            copy_row_tile(
                q_desc, dout_desc, lse2_desc, means_desc, q_smem, dout_smem, lse2_smem, means_smem, ready, free,
                first_row, head, count, NUM_STAGES,
            )  # fmt: skip
            count += 1
    return count


@gluon.jit
def copy_for_keys(
    q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
    q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, kv_head,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: keys and values once, then rows of every head of the group."""
    copy_own_keys(k_desc, v_desc, k_smem, v_smem, own_ready, tile, kv_head, BLOCK_N)
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
def probabilities(
    products, lse2, first_row, keys, lifetime, key_positions, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, BLOCK_M: gl.constexpr, IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """[N, M] from products; lse2 [M] in base 2.

    Exponents may be masked, products may not: a row without keys has minus infinity for lse2.
    """
    exponents = products * factor - lse2[None, :]
    if IS_PARTIAL and not HAS_WINDOW:
        rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, PRODUCTS))
        exponents = where_less(exponents, rows[None, :] - keys[:, None], lifetime[:, None])
    probs = gl.exp2(exponents)
    # With positions in registers, masks one after the other make the compiler spill.
    if IS_PARTIAL and HAS_WINDOW:
        rows = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, PRODUCTS))
        row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
        allowed = may_read(
            rows[None, :], keys[:, None], lifetime[:, None],
            row_positions[None, :], key_positions[:, None], window, HAS_WINDOW,
        )  # fmt: skip
        probs = gl.where(allowed, probs, 0.0)
    return probs


@gluon.jit
def add_rows(
    k_smem, v_smem, own, q_smem, dout_smem, lse2_smem, means_smem, ready, free, dk, dv, count,
    offsets_ptr, start_ptr, end_ptr, item, keys, lifetime, key_positions, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr, IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Adds one list of row tiles to dK and dV, [N, D] each."""
    for interval in range(gl.load(offsets_ptr + item), gl.load(offsets_ptr + item + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        for step in range(0, GROUP * length):
            stage = count % NUM_STAGES
            mbarrier.wait(ready.index(stage), (count // NUM_STAGES) & 1)
            q, dout = matrix(q_smem, stage), matrix(dout_smem, stage)
            none = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, PRODUCTS)
            products = warpgroup_mma(
                matrix_in_loop(k_smem, own, count), q.permute([1, 0]), none, use_acc=False, is_async=True
            )
            dprobs = warpgroup_mma(
                matrix_in_loop(v_smem, own, count), dout.permute([1, 0]), none, use_acc=False, is_async=True
            )
            lse2 = lse2_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, PRODUCTS))
            products = warpgroup_mma_wait(1, deps=[products])
            probs = probabilities(
                products, lse2, (start + step % length) * BLOCK_M, keys, lifetime, key_positions, positions_ptr,
                T, factor, window, PRODUCTS, BLOCK_M, IS_PARTIAL, HAS_WINDOW,
            )  # fmt: skip
            probs16 = gl.convert_layout(probs.to(q_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
            means = means_smem.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, PRODUCTS))
            dv = warpgroup_mma(probs16, dout, dv, is_async=True)
            dprobs = warpgroup_mma_wait(1, deps=[dprobs])
            dscores = probs * (dprobs - means[None, :])
            dscores16 = gl.convert_layout(dscores.to(q_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
            dk = warpgroup_mma(dscores16, q, dk, is_async=True)
            # Nothing may be in flight at the loop's end: the assembler would wait for every product.
            dk, dv, _, _ = warpgroup_mma_wait(0, deps=[dk, dv, probs16, dscores16])
            mbarrier.arrive(free.index(stage))
            count += 1
    return dk, dv, count


@gluon.jit
def key_gradients(
    dk_desc, dv_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A group of four warps: 64 keys. Products are [N, M], so that probs and dscores are left operands as they are."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    first_key = tile * (BLOCK_N * NUM_GROUPS) + GROUP_INDEX * BLOCK_N
    keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PRODUCTS))
    lifetime = gl.maximum(gl.load(expiry_ptr + keys, mask=keys < T, other=0) - keys, 0)
    key_positions = keys
    if HAS_WINDOW:
        key_positions = gl.load(positions_ptr + keys, mask=keys < T, other=0)
    factor = softmax_scale * LOG2E
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, GRADS)
    mbarrier.wait(own_ready.index(GROUP_INDEX), 0)
    dk, dv, count = add_rows(
        k_smem, v_smem, GROUP_INDEX, q_smem, dout_smem, lse2_smem, means_smem, ready, free, dk, dv, gl.to_tensor(0),
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, item, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, True, HAS_WINDOW,
    )  # fmt: skip
    dk, dv, count = add_rows(
        k_smem, v_smem, GROUP_INDEX, q_smem, dout_smem, lse2_smem, means_smem, ready, free, dk, dv, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, item, keys, lifetime, key_positions,
        positions_ptr, T, factor, window,
        PRODUCTS, GRADS, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES, False, HAS_WINDOW,
    )  # fmt: skip
    dk = dk * softmax_scale
    if slot < 0:
        # The group's keys and values are spent: their memory takes the gradients on their way out.
        matrix(k_smem, GROUP_INDEX).store(dk.to(k_smem.dtype))
        matrix(v_smem, GROUP_INDEX).store(dv.to(v_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [first_key, kv_head, 0], k_smem.index(GROUP_INDEX))
        tma.async_copy_shared_to_global(dv_desc, [first_key, kv_head, 0], v_smem.index(GROUP_INDEX))
        tma.store_wait(0)
    else:
        part = (slot.to(gl.int64) * num_kv_heads + kv_head) * (BLOCK_N * NUM_GROUPS) + GROUP_INDEX * BLOCK_N
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, GRADS))
        offs_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, GRADS))
        offs = (part + offs_n)[:, None] * D + offs_d[None, :]
        gl.store(dk_parts_ptr + offs, dk, mask=(offs_d < D)[None, :])
        gl.store(dv_parts_ptr + offs, dv, mask=(offs_d < D)[None, :])


@gluon.jit
def own_keys(
    q_desc, dout_desc, k_desc, v_desc, dk_desc, dv_desc, lse2_desc, means_desc,
    dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[2]
    q_smem, dout_smem = allocate(q_desc, NUM_STAGES), allocate(dout_desc, NUM_STAGES)
    k_smem, v_smem = allocate(k_desc, NUM_GROUPS), allocate(v_desc, NUM_GROUPS)
    lse2_smem, means_smem = allocate(lse2_desc, NUM_STAGES), allocate(means_desc, NUM_STAGES)
    own_ready, ready, free = barriers(NUM_GROUPS, 1), barriers(NUM_STAGES, 1), barriers(NUM_STAGES, NUM_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (key_gradients, (
                dk_desc, dv_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                0, GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, HAS_WINDOW,
            )),
            (key_gradients, (
                dk_desc, dv_desc, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                1, GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, NUM_STAGES, HAS_WINDOW,
            )),
            (copy_for_keys, (
                q_desc, dout_desc, k_desc, v_desc, lse2_desc, means_desc,
                q_smem, dout_smem, k_smem, v_smem, lse2_smem, means_smem, own_ready, ready, free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                item, tile, kv_head, GROUP, BLOCK_M, BLOCK_N, NUM_STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
