"""The backward kernel for Hopper, in Gluon: a warp that copies tiles, and two groups of four warps that compute.

The plan is the portable kernel's: a program owns 128 keys (each group 64 of them) or 128 rows, and writes its
gradients once. Within a turn a group queues products before it needs them; while it takes exponentials, the
other group's products fill the tensor cores.
"""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: T rows, H heads (Hq query, Hkv key and value), D head dim, M rows of a tile, N keys of a tile.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ratoon.attention.triton.hopper.keys import own_keys
from ratoon.attention.triton.hopper.keys_by_role import own_keys_by_role
from ratoon.attention.triton.hopper.rows import own_rows
from ratoon.attention.triton.specialisation import FOLLOWS_LAYOUT


@gluon.jit(do_not_specialize=FOLLOWS_LAYOUT)
def backward_kernel(
    q_desc, dout_desc, k_item_desc, v_item_desc, dk_desc, dv_desc, lse2_desc, means_desc,
    k_row_desc, v_row_desc, dq_desc, terms_desc,
    lse2_ptr, means_ptr, dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
    work_ptr, item_tile_ptr, item_slot_ptr, item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
    item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
    tile_ptr, full_offsets_ptr, full_start_ptr, full_end_ptr,
    partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
    stride_lh, T, num_items, num_tiles, num_kv_heads, softmax_scale, window,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, ITEM_N: gl.constexpr, BLOCK_N: gl.constexpr,
    ITEM_STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    BY_ROLE: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Programs [0, items * Hkv) own ITEM_N keys a group, or in all `BY_ROLE`; the others own BLOCK_M rows a group.

    A visiting tile of rows has BLOCK_M rows, a visiting tile of keys BLOCK_N keys.
    """
    program = gl.program_id(0)
    num_item_programs = num_items * num_kv_heads
    if program < num_item_programs:
        work = gl.load(work_ptr + program)
        item = work // num_kv_heads
        kv_head = work % num_kv_heads
        tile = gl.load(item_tile_ptr + item)
        slot = gl.load(item_slot_ptr + item)
        if BY_ROLE:
            own_keys_by_role(
                q_desc, dout_desc, k_item_desc, v_item_desc, dk_desc, dv_desc, lse2_desc, means_desc,
                dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
                item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                GROUP, D, BLOCK_M, ITEM_N, ITEM_STAGES, HAS_WINDOW,
            )  # fmt: skip
        else:
            own_keys(
                q_desc, dout_desc, k_item_desc, v_item_desc, dk_desc, dv_desc, lse2_desc, means_desc,
                dk_parts_ptr, dv_parts_ptr, expiry_ptr, positions_ptr,
                item_full_offsets_ptr, item_full_start_ptr, item_full_end_ptr,
                item_partial_offsets_ptr, item_partial_start_ptr, item_partial_end_ptr,
                item, tile, slot, kv_head, num_kv_heads, T, softmax_scale, window,
                GROUP, D, BLOCK_M, ITEM_N, ITEM_STAGES, HAS_WINDOW,
            )  # fmt: skip
    else:
        rank = program - num_item_programs
        head = rank // num_tiles
        own_rows(
            q_desc, dout_desc, k_row_desc, v_row_desc, dq_desc, terms_desc, lse2_ptr, means_ptr, positions_ptr,
            full_offsets_ptr, full_start_ptr, full_end_ptr, partial_offsets_ptr, partial_start_ptr, partial_end_ptr,
            gl.load(tile_ptr + rank % num_tiles), head, head // GROUP, stride_lh, T, softmax_scale, window,
            BLOCK_M, BLOCK_N, KEY_STAGES, VALUE_STAGES, HAS_WINDOW,
        )  # fmt: skip
