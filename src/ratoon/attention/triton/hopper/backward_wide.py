"""The backward kernel for the widest heads: one gradient a program, because two of them do not fit into the registers.

Three kinds of programs. Two own 64 keys, one for dK and one for dV; the third owns 64 rows, for dQ. The two groups
share the tile and each sums half of the gradient's columns. dV needs probabilities: one group computes and both
multiply them. dK and dQ need the scores' gradients: one group computes probabilities, the other what they are
multiplied by, and hands the product back. Scores are computed three times in all, which is 1.6 times the products
that gradients need at least.
"""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, O rows or keys that a program owns,
# V rows or keys that visit it, C columns of half a head.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ratoon.attention.triton.hopper.warps import NUM_GROUPS, allocate, barriers, matrix, matrix_in_loop, where_less
from ratoon.attention.triton.scores import LOG2E
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@gluon.jit
def copy_columns(desc, smem, bar, first_row, head):
    """Both halves of a tile's columns, as two tiles."""
    mbarrier.expect(bar, NUM_GROUPS * desc.block_type.nbytes)
    for half in gl.static_range(NUM_GROUPS):
        columns = half * desc.block_type.shape[2]
        tma.async_copy_global_to_shared(desc, [first_row, head, columns], bar, smem.index(half))


@gluon.jit
def multiply_heads(own_smem, visitor_smem, none, count):
    """[O, V] products of whole heads, in flight."""
    products = warpgroup_mma(
        matrix_in_loop(own_smem, 0, count),
        matrix_in_loop(visitor_smem, 0, count).permute([1, 0]),
        none,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        matrix_in_loop(own_smem, 1, count),
        matrix_in_loop(visitor_smem, 1, count).permute([1, 0]),
        products,
        is_async=True,
    )


@gluon.jit
def visitor(start, length, step, kv_head, OWNS_KEYS: gl.constexpr, GROUP: gl.constexpr):
    """Tile and head of a step: rows pass by for each query head of the key head, keys once."""
    tile = start + step
    head = kv_head
    if OWNS_KEYS:
        tile = start + step % length
        head = kv_head * GROUP + step // length
    return tile, head


@gluon.jit
def copy_visitors(
    score_desc, value_desc, score_smem, value_smem, score_ready, score_free, value_ready, value_free,
    offsets_ptr, start_ptr, end_ptr, list_index, kv_head, count,
    OWNS_KEYS: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """Queries and output gradients, or keys and values: a tile of each in memory, copied when the last one is spent."""
    for interval in range(gl.load(offsets_ptr + list_index), gl.load(offsets_ptr + list_index + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        num_steps = length
        if OWNS_KEYS:
            num_steps = length * GROUP
        for step in range(0, num_steps):
            tile, head = visitor(start, length, step, kv_head, OWNS_KEYS, GROUP)
            for part in gl.static_range(TILE // BLOCK_V):
                first = tile * TILE + part * BLOCK_V
                mbarrier.wait(score_free.index(0), (count & 1) ^ 1)
                copy_columns(score_desc, score_smem, score_ready.index(0), first, head)
                mbarrier.wait(value_free.index(0), (count & 1) ^ 1)
                copy_columns(value_desc, value_smem, value_ready.index(0), first, head)
                count += 1
    return count


@gluon.jit
def copy_all(
    own_score_desc, own_value_desc, score_desc, value_desc,
    own_score_smem, own_value_smem, score_smem, value_smem,
    own_ready, score_ready, score_free, value_ready, value_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    list_index, tile, own_head, kv_head,
    OWNS_KEYS: gl.constexpr, NEEDS_VALUES: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_O: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    copy_columns(own_score_desc, own_score_smem, own_ready.index(0), tile * BLOCK_O, own_head)
    if NEEDS_VALUES:
        copy_columns(own_value_desc, own_value_smem, own_ready.index(1), tile * BLOCK_O, own_head)
    count = copy_visitors(
        score_desc, value_desc, score_smem, value_smem, score_ready, score_free, value_ready, value_free,
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, list_index, kv_head, gl.to_tensor(0),
        OWNS_KEYS, GROUP, TILE, BLOCK_V,
    )  # fmt: skip
    copy_visitors(
        score_desc, value_desc, score_smem, value_smem, score_ready, score_free, value_ready, value_free,
        full_offsets_ptr, full_start_ptr, full_end_ptr, list_index, kv_head, count, OWNS_KEYS, GROUP, TILE, BLOCK_V,
    )  # fmt: skip


LEAST = gl.constexpr(-(2**31))
"""Added to signed numbers, it orders them as unsigned ones."""


@gluon.jit
def where_within(values, distances, window):
    """values where distances < window as signed numbers, else minus infinity."""
    return where_less(values, distances + LEAST, window + LEAST)


@gluon.jit
def probabilities(
    products, own, first_visitor, own_terms, terms_ptr, of_head, expiry_ptr, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, OWNS_KEYS: gl.constexpr, BLOCK_V: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """[O, V] from products; own_terms are the owned rows' log-sum-exps in base 2, or unused where keys are owned."""
    visitors = first_visitor + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, PRODUCTS))
    lse2 = own_terms[:, None]
    if OWNS_KEYS:
        lse2 = gl.load(terms_ptr + of_head + visitors, mask=visitors < T, other=0.0)[None, :]
    exponents = products * factor - lse2
    if IS_PARTIAL:
        rows, keys = own[:, None], visitors[None, :]
        if OWNS_KEYS:
            rows, keys = visitors[None, :], own[:, None]
        lifetime = gl.maximum(gl.load(expiry_ptr + keys, mask=keys < T, other=0) - keys, 0)
        exponents = where_less(exponents, rows - keys, lifetime)
        if HAS_WINDOW:
            row_positions = gl.load(positions_ptr + rows, mask=rows < T, other=0)
            key_positions = gl.load(positions_ptr + keys, mask=keys < T, other=0)
            exponents = where_within(exponents, row_positions - key_positions, window)
    return gl.exp2(exponents)


@gluon.jit
def store_half(
    grad, desc, spent_smem, parts_ptr, first, slot, head, num_heads, half_index,
    BLOCK_O: gl.constexpr, BLOCK_C: gl.constexpr, GRADS: gl.constexpr,
):  # fmt: skip
    """Half of a gradient's columns, by way of memory that nobody reads any more; or to its place among the parts."""
    if slot < 0:
        matrix(spent_smem, half_index).store(grad.to(spent_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [first, head, half_index * BLOCK_C], spent_smem.index(half_index))
        tma.store_wait(0)
    else:
        part = (slot.to(gl.int64) * num_heads + head) * BLOCK_O
        offs_o = gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, GRADS))
        offs_c = gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, GRADS))
        gl.store(
            parts_ptr + (part + offs_o)[:, None] * (BLOCK_C * NUM_GROUPS) + (half_index * BLOCK_C + offs_c)[None, :],
            grad,
        )


@gluon.jit
def weigh_list(
    own_smem, score_smem, value_smem, probs_smem, dscores_smem,
    score_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free, grad, count,
    offsets_ptr, start_ptr, end_ptr, list_index, kv_head, own, own_terms, terms_ptr, stride_lh,
    expiry_ptr, positions_ptr, T, factor, window,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, OWNS_KEYS: gl.constexpr, OF_VALUES: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_O: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
    IS_PARTIAL: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The group that computes probabilities, and sums the first half of the columns.

    OF_VALUES: the gradient is dV, which probabilities are multiplied into; else the other group makes scores'
    gradients of them.
    """
    for interval in range(gl.load(offsets_ptr + list_index), gl.load(offsets_ptr + list_index + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        num_steps = length
        if OWNS_KEYS:
            num_steps = length * GROUP
        for step in range(0, num_steps):
            tile, head = visitor(start, length, step, kv_head, OWNS_KEYS, GROUP)
            of_head = head.to(gl.int64) * stride_lh
            for part in gl.static_range(TILE // BLOCK_V):
                mbarrier.wait(score_ready.index(0), count & 1)
                none = gl.zeros([BLOCK_O, BLOCK_V], gl.float32, PRODUCTS)
                products = warpgroup_mma_wait(0, deps=[multiply_heads(own_smem, score_smem, none, count)])
                if OF_VALUES:
                    mbarrier.arrive(score_free.index(0))
                probs = probabilities(
                    products, own, tile * TILE + part * BLOCK_V, own_terms, terms_ptr, of_head,
                    expiry_ptr, positions_ptr, T, factor, window,
                    PRODUCTS, OWNS_KEYS, BLOCK_V, IS_PARTIAL, HAS_WINDOW,
                )  # fmt: skip
                mbarrier.wait(probs_free.index(0), (count & 1) ^ 1)
                probs_smem.store(probs.to(probs_smem.dtype))
                fence_async_shared()
                mbarrier.arrive(probs_ready.index(0))
                if OF_VALUES:
                    mbarrier.wait(value_ready.index(0), count & 1)
                    weights = gl.convert_layout(probs.to(value_smem.dtype), gl.DotOperandLayout(0, GRADS, 2))
                    grad = warpgroup_mma(weights, matrix_in_loop(value_smem, 0, count), grad, is_async=True)
                    grad, _ = warpgroup_mma_wait(0, deps=[grad, weights])
                    mbarrier.arrive(value_free.index(0))
                else:
                    mbarrier.wait(dscores_ready.index(0), count & 1)
                    grad = warpgroup_mma(dscores_smem, matrix_in_loop(score_smem, 0, count), grad, is_async=True)
                    grad = warpgroup_mma_wait(0, deps=[grad])
                    mbarrier.arrive(dscores_free.index(0))
                    mbarrier.arrive(score_free.index(0))
                count += 1
    return grad, count


@gluon.jit
def take_over_list(
    own_smem, score_smem, value_smem, probs_smem, dscores_smem,
    score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free, grad, count,
    offsets_ptr, start_ptr, end_ptr, list_index, kv_head, own_terms, terms_ptr, stride_lh, T,
    PRODUCTS: gl.constexpr, GRADS: gl.constexpr, OWNS_KEYS: gl.constexpr, OF_VALUES: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_O: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """The other group: takes probabilities over, and sums the second half of the columns."""
    for interval in range(gl.load(offsets_ptr + list_index), gl.load(offsets_ptr + list_index + 1)):
        start = gl.load(start_ptr + interval)
        length = gl.load(end_ptr + interval) - start
        num_steps = length
        if OWNS_KEYS:
            num_steps = length * GROUP
        for step in range(0, num_steps):
            tile, head = visitor(start, length, step, kv_head, OWNS_KEYS, GROUP)
            of_head = head.to(gl.int64) * stride_lh
            for part in gl.static_range(TILE // BLOCK_V):
                mbarrier.wait(value_ready.index(0), count & 1)
                if OF_VALUES:
                    mbarrier.wait(probs_ready.index(0), count & 1)
                    grad = warpgroup_mma(probs_smem, matrix_in_loop(value_smem, 1, count), grad, is_async=True)
                    grad = warpgroup_mma_wait(0, deps=[grad])
                    mbarrier.arrive(probs_free.index(0))
                    mbarrier.arrive(value_free.index(0))
                else:
                    none = gl.zeros([BLOCK_O, BLOCK_V], gl.float32, PRODUCTS)
                    dprobs = multiply_heads(own_smem, value_smem, none, count)
                    if OWNS_KEYS:
                        rows = tile * TILE + part * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, PRODUCTS))
                        means = gl.load(terms_ptr + of_head + rows, mask=rows < T, other=0.0)[None, :]
                    else:
                        means = own_terms[:, None]
                    dprobs = warpgroup_mma_wait(0, deps=[dprobs])
                    mbarrier.arrive(value_free.index(0))
                    mbarrier.wait(probs_ready.index(0), count & 1)
                    dscores = probs_smem.load(PRODUCTS) * (dprobs - means)
                    mbarrier.arrive(probs_free.index(0))
                    weights = dscores.to(dscores_smem.dtype)
                    mbarrier.wait(dscores_free.index(0), (count & 1) ^ 1)
                    dscores_smem.store(weights)
                    fence_async_shared()
                    mbarrier.arrive(dscores_ready.index(0))
                    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, GRADS, 2))
                    grad = warpgroup_mma(weights, matrix_in_loop(score_smem, 1, count), grad, is_async=True)
                    grad, _ = warpgroup_mma_wait(0, deps=[grad, weights])
                    mbarrier.arrive(score_free.index(0))
                count += 1
    return grad, count


@gluon.jit
def owned_terms(terms_ptr, own, head, stride_lh, T, OWNS_KEYS: gl.constexpr):
    """[O] terms of owned rows; zeros for keys, which have none."""
    terms = gl.load(terms_ptr + head.to(gl.int64) * stride_lh + own, mask=own < T, other=0.0)
    if OWNS_KEYS:
        terms = terms * 0.0
    return terms


@gluon.jit
def weigh_and_sum(
    grad_desc, parts_ptr, lse2_ptr, expiry_ptr, positions_ptr,
    own_smem, score_smem, value_smem, probs_smem, dscores_smem,
    own_ready, score_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    list_index, tile, slot, own_head, num_heads, kv_head, stride_lh, T, softmax_scale, grad_scale, window,
    OWNS_KEYS: gl.constexpr, OF_VALUES: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_O: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_C: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    own = tile * BLOCK_O + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, PRODUCTS))
    own_lse2 = owned_terms(lse2_ptr, own, own_head, stride_lh, T, OWNS_KEYS)
    factor = softmax_scale * LOG2E
    grad = gl.zeros([BLOCK_O, BLOCK_C], gl.float32, GRADS)
    mbarrier.wait(own_ready.index(0), 0)
    grad, count = weigh_list(
        own_smem, score_smem, value_smem, probs_smem, dscores_smem,
        score_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
        grad, gl.to_tensor(0),
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, list_index, kv_head, own, own_lse2, lse2_ptr,
        stride_lh, expiry_ptr, positions_ptr, T, factor, window,
        PRODUCTS, GRADS, OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V, True, HAS_WINDOW,
    )  # fmt: skip
    grad, count = weigh_list(
        own_smem, score_smem, value_smem, probs_smem, dscores_smem,
        score_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
        grad, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, list_index, kv_head, own, own_lse2, lse2_ptr,
        stride_lh, expiry_ptr, positions_ptr, T, factor, window,
        PRODUCTS, GRADS, OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V, False, HAS_WINDOW,
    )  # fmt: skip
    store_half(
        grad * grad_scale, grad_desc, own_smem, parts_ptr, tile * BLOCK_O, slot, own_head, num_heads, 0,
        BLOCK_O, BLOCK_C, GRADS,
    )  # fmt: skip


@gluon.jit
def take_over_and_sum(
    grad_desc, parts_ptr, means_ptr,
    spent_smem, own_smem, score_smem, value_smem, probs_smem, dscores_smem,
    own_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    list_index, tile, slot, own_head, num_heads, kv_head, stride_lh, T, grad_scale,
    OWNS_KEYS: gl.constexpr, OF_VALUES: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_O: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_C, 16])
    own = tile * BLOCK_O + gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, PRODUCTS))
    own_means = owned_terms(means_ptr, own, own_head, stride_lh, T, OWNS_KEYS)
    grad = gl.zeros([BLOCK_O, BLOCK_C], gl.float32, GRADS)
    if not OF_VALUES:
        mbarrier.wait(own_ready.index(1), 0)
    grad, count = take_over_list(
        own_smem, score_smem, value_smem, probs_smem, dscores_smem,
        score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
        grad, gl.to_tensor(0),
        partial_offsets_ptr, partial_start_ptr, partial_end_ptr, list_index, kv_head, own_means, means_ptr,
        stride_lh, T, PRODUCTS, GRADS, OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V,
    )  # fmt: skip
    grad, count = take_over_list(
        own_smem, score_smem, value_smem, probs_smem, dscores_smem,
        score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
        grad, count,
        full_offsets_ptr, full_start_ptr, full_end_ptr, list_index, kv_head, own_means, means_ptr,
        stride_lh, T, PRODUCTS, GRADS, OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V,
    )  # fmt: skip
    store_half(
        grad * grad_scale, grad_desc, spent_smem, parts_ptr, tile * BLOCK_O, slot, own_head, num_heads, 1,
        BLOCK_O, BLOCK_C, GRADS,
    )  # fmt: skip


@gluon.jit
def sum_gradient(
    own_score_desc, own_value_desc, score_desc, value_desc, grad_desc, parts_ptr,
    lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
    full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    list_index, tile, slot, own_head, num_heads, kv_head, stride_lh, T, softmax_scale, grad_scale, window,
    OWNS_KEYS: gl.constexpr, OF_VALUES: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """One tile's dK or dQ, or dV (OF_VALUES). Scores are of own_score and score, dprobs of own_value and value."""
    BLOCK_O: gl.constexpr = own_score_desc.block_type.shape[0]
    BLOCK_V: gl.constexpr = score_desc.block_type.shape[0]
    BLOCK_C: gl.constexpr = score_desc.block_type.shape[2]
    own_score_smem, score_smem = allocate(own_score_desc, NUM_GROUPS), allocate(score_desc, NUM_GROUPS)
    value_smem = allocate(value_desc, NUM_GROUPS)
    own_value_smem = own_score_smem
    dtype: gl.constexpr = score_desc.dtype
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_V * 2, element_bitwidth=16, rank=2)
    if OF_VALUES:
        probs_smem = gl.allocate_shared_memory(dtype, [BLOCK_O, BLOCK_V], narrow)
        dscores_smem = probs_smem
    else:
        own_value_smem = allocate(own_value_desc, NUM_GROUPS)
        single: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        probs_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_O, BLOCK_V], single)
        dscores_smem = gl.allocate_shared_memory(dtype, [BLOCK_O, BLOCK_V], narrow)
    own_ready, score_ready, value_ready = barriers(NUM_GROUPS, 1), barriers(1, 1), barriers(1, 1)
    # dV: scores are one group's, values both groups'; dK and dQ: the other way round.
    if OF_VALUES:
        score_free, value_free = barriers(1, 1), barriers(1, NUM_GROUPS)
    else:
        score_free, value_free = barriers(1, NUM_GROUPS), barriers(1, 1)
    probs_ready, probs_free, dscores_ready, dscores_free = (
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
    )
    fence_async_shared()
    # dV's second half leaves by way of the keys' second half, which the first group has read for the last time
    # before it hands the last probabilities over.
    gl.warp_specialize(
        [
            (weigh_and_sum, (
                grad_desc, parts_ptr, lse2_ptr, expiry_ptr, positions_ptr,
                own_score_smem, score_smem, value_smem, probs_smem, dscores_smem,
                own_ready, score_ready, score_free, value_ready, value_free,
                probs_ready, probs_free, dscores_ready, dscores_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                list_index, tile, slot, own_head, num_heads, kv_head, stride_lh, T, softmax_scale, grad_scale, window,
                OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V, BLOCK_C, HAS_WINDOW,
            )),
            (take_over_and_sum, (
                grad_desc, parts_ptr, means_ptr,
                own_value_smem, own_value_smem, score_smem, value_smem, probs_smem, dscores_smem,
                own_ready, score_free, value_ready, value_free, probs_ready, probs_free, dscores_ready, dscores_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                list_index, tile, slot, own_head, num_heads, kv_head, stride_lh, T, grad_scale,
                OWNS_KEYS, OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V, BLOCK_C,
            )),
            (copy_all, (
                own_score_desc, own_value_desc, score_desc, value_desc,
                own_score_smem, own_value_smem, score_smem, value_smem,
                own_ready, score_ready, score_free, value_ready, value_free,
                full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
                list_index, tile, own_head, kv_head,
                OWNS_KEYS, not OF_VALUES, GROUP, BLOCK_O, TILE, BLOCK_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=FOLLOWS_LAYOUT)
def backward_wide_kernel(
    q_own_desc, dout_own_desc, k_own_desc, v_own_desc, q_tile_desc, dout_tile_desc,
    q_part_desc, dout_part_desc, k_part_desc, v_part_desc, dq_desc, dk_desc, dv_desc,
    lse2_ptr, means_ptr, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    work_ptr, item_tile_ptr, item_slot_ptr, item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
    item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_items, num_tiles, num_kv_heads, softmax_scale, window,
    GROUP: gl.constexpr, ITEM_TILE: gl.constexpr, ROW_TILE: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Programs: dK of every item and head, then dV of every item and head, then dQ of every tile and head.

    Descriptors have half the columns. `_own` ones are of owned tiles; `_tile` ones of the rows that visit for dV,
    ITEM_TILE of them; `_part` ones of fewer, because dK and dQ need more beside them.
    """
    program = gl.program_id(0)
    num_item_programs = num_items * num_kv_heads
    if program < 2 * num_item_programs:
        work = gl.load(work_ptr + program % num_item_programs)
        item = work // num_kv_heads
        kv_head = work % num_kv_heads
        tile = gl.load(item_tile_ptr + item)
        slot = gl.load(item_slot_ptr + item)
        if program < num_item_programs:
            sum_gradient(
                k_own_desc, v_own_desc, q_part_desc, dout_part_desc, dk_desc, dk_parts_ptr,
                lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
                item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
                item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, kv_head, stride_lh, T, softmax_scale, softmax_scale, window,
                True, False, GROUP, ITEM_TILE, HAS_WINDOW,
            )  # fmt: skip
        else:
            sum_gradient(
                k_own_desc, v_own_desc, q_tile_desc, dout_tile_desc, dv_desc, dv_parts_ptr,
                lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
                item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
                item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, kv_head, stride_lh, T, softmax_scale, 1.0, window,
                True, True, GROUP, ITEM_TILE, HAS_WINDOW,
            )  # fmt: skip
    else:
        rank = program - 2 * num_item_programs
        head = rank // num_tiles
        tile = gl.load(tile_ptr + rank % num_tiles)
        # -1: rows are never split. Triton 3.6 fails on a slot that it knows to be -1.
        slot = -1 - (tile >> 31)
        sum_gradient(
            q_own_desc, dout_own_desc, k_part_desc, v_part_desc, dq_desc, dk_parts_ptr,
            lse2_ptr, means_ptr, expiry_ptr, positions_ptr,
            full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
            tile, tile, slot, head, num_kv_heads * GROUP, head // GROUP, stride_lh, T,
            softmax_scale, softmax_scale, window,
            False, False, GROUP, ROW_TILE, HAS_WINDOW,
        )  # fmt: skip
