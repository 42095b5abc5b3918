"""What both kernels are made of: tiles and barriers in shared memory, the rule, an order that the assembler keeps."""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

# Shape letters: D head dim, M rows of a tile, N keys of a tile.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

NUM_GROUPS = gl.constexpr(2)
"""Groups of four warps that compute; one more warp copies."""


@gluon.jit
def allocate(desc, NUM_TILES: gl.constexpr):
    """[tiles, M, 1, D] in shared memory."""
    return gl.allocate_shared_memory(desc.dtype, [NUM_TILES] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def matrix(smem, index):
    """Tile `index` of [tiles, M, 1, D] as [M, D]."""
    return smem.index(index).reshape([smem.shape[1], smem.shape[3]])


@gluon.jit
def matrix_in_loop(smem, index, count):
    """`matrix`, with its address worked out inside a loop over `count`, which is never negative.

    Outside the loop, where the compiler would have it, the addresses of all products' operands wait in registers,
    which hold sums.
    """
    return matrix(smem, index + (count >> 31))


@gluon.jit
def barriers(NUM_BARRIERS: gl.constexpr, count: gl.constexpr):
    """Barriers that complete a phase with `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bars.index(index), count=count)
    return bars


@gluon.jit
def may_read(
    rows, keys, lifetime, row_positions, key_positions, window, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The rule (`is_read` of scores.py); lifetime is what is left of a key's expiry, at least 0. Shapes broadcast."""
    allowed = (rows - keys).to(gl.uint32) < lifetime.to(gl.uint32)
    if HAS_WINDOW:
        allowed = allowed & (row_positions - key_positions < window)
    return allowed


@gluon.jit
def stay_before(values):
    """The assembler moves arithmetic behind a later wait for the tensor cores, where it overlaps with nothing.

    A warp's barrier, whose mask (all threads, for values that are not negative) is made of the values, holds it back.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 mask; shr.s32 mask, $1, 31; not.b32 mask, mask; bar.warp.sync mask; mov.b32 $0, $1; }",
        "=r,r", [values], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def rounded_in_pairs(values, dtype: gl.constexpr):
    """fp32 numbers rounded to bf16 or fp16, in fp32.

    Where the compiler sees a rounded number made wide again it rounds each by itself, at the rate of exponentials.
    """
    if dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.f32 pair, $3, $2; mov.b32 {low, high}, pair; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return wide


@gluon.jit
def where_less(values, x, y):
    """values where x < y as unsigned numbers, else minus infinity; int32 x and y. Shapes broadcast.

    Where the compiler sees a tile's comparisons it gathers their outcomes as bits of numbers, and takes them out again.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred less; setp.lt.u32 less, $2, $3; selp.f32 $0, $1, 0fFF800000, less; }",
        "=f,f,r,r", [values, x, y], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_tile(desc, smem, ready, free, first_row, head, count, NUM_STAGES: gl.constexpr):
    """The count-th tile: waits until the groups have left its stage, then fills it."""
    stage = count % NUM_STAGES
    mbarrier.wait(free.index(stage), ((count // NUM_STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [first_row, head, 0], ready.index(stage), smem.index(stage))
