"""One pass over a tile of logits: forward adds it to the softmax's sums, backward turns it into a gradient.

Both read the matrix product as it is, fp32, and apply bias, softcap and temperature to it in registers.
"""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: M scored tokens, V vocabulary; m, v: one tile of them. y and d (bits below the row's largest) as in
# `transform` and `projection`.

import triton
import triton.language as tl
from torch import Tensor

from ratoon.ops.launch import on_device_of
from ratoon.ops.logprob.gradients import RowGrads
from ratoon.ops.logprob.projection import ProductTile
from ratoon.ops.logprob.scoring import RunningSums

BLOCK_COLUMNS = 1024
"""Of one row, that a program takes at a time. The passes are bound by memory: 16 bytes a load, many programs."""

NUM_WARPS = 4

LOG2_E = tl.constexpr(1.4426950408889634)
NEGLIGIBLE_BITS = tl.constexpr(-64.0)
NOTHING_BITS = tl.constexpr(-256.0)
"""What `projection.drop_negligible_` says: d below the first becomes the second, whose exp2 is 0."""


@triton.jit
def _tanh(x):
    """Within a few roundings, relatively, also near 0. NaN stays NaN."""
    size = tl.abs(x)
    square = x * x
    # tanh(x) / x as a polynomial of x^2, off by less than 1e-8 up to 0.6: 1 - exp(-2x) would cancel there.
    poly = tl.fma(square, -0.0062763901, 0.0211162160)
    poly = tl.fma(square, poly, -0.0538751388)
    poly = tl.fma(square, poly, 0.1333292401)
    poly = tl.fma(square, poly, -0.3333333043)
    near = tl.fma(size * square, poly, size)
    decayed = tl.exp2(size * (-2.0 * LOG2_E))
    result = tl.where(size < 0.6, near, (1.0 - decayed) / (1.0 + decayed))
    return tl.where(x < 0.0, -result, result)


@triton.jit
def _bits_below_max(y, row_max, gain_out_bits):
    """d, negligible ones dropped; not with the comparison turned round, so that NaN stays NaN.

    Subtracting first is exact where it matters: an offset common to all logits costs nothing.
    """
    bits = (y - row_max) * gain_out_bits
    return tl.where(bits <= NEGLIGIBLE_BITS, NOTHING_BITS, bits)


@triton.jit
def add_to_sums_kernel(
    product_ptr, bias_ptr, target_ptr, max_ptr, exp_sum_ptr, weighted_sum_ptr, target_y_ptr,
    stride_pm, num_columns, first_column, gain_out_bits,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program for each row of the tile: nobody else adds to its sums, so their order is fixed."""
    row = tl.program_id(0).to(tl.int64)
    product_ptr += row * stride_pm
    row_max = tl.load(max_ptr + row)
    exp_sum = tl.load(exp_sum_ptr + row)
    weighted_sum = tl.load(weighted_sum_ptr + row)
    exp_parts = tl.zeros([BLOCK_V], tl.float32)
    weighted_parts = tl.zeros([BLOCK_V], tl.float32)

    for start in range(0, num_columns, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < num_columns
        y = tl.load(product_ptr + offs_v, mask=mask_v, other=-float("inf"))  # [BLOCK_V]
        if HAS_BIAS:
            y += tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0)
        if HAS_CAP:
            y = tl.where(mask_v, _tanh(y), -float("inf"))
        new_max = tl.maximum(row_max, tl.max(y, axis=0))
        # Old entries move to the new maximum: d + shift. The bound keeps the first shift finite: no 0 * inf.
        shift = (row_max - new_max) * gain_out_bits
        shift = tl.where(shift < -300.0, -300.0, shift)
        decay = tl.exp2(shift)
        weighted_parts = tl.fma(exp_parts, shift, weighted_parts) * decay
        weighted_sum = tl.fma(exp_sum, shift, weighted_sum) * decay
        exp_parts = exp_parts * decay
        exp_sum = exp_sum * decay
        row_max = new_max

        bits = _bits_below_max(y, new_max, gain_out_bits)
        exp = tl.exp2(bits)
        exp_parts += exp
        weighted_parts = tl.fma(exp, bits, weighted_parts)

    tl.store(max_ptr + row, row_max)
    tl.store(exp_sum_ptr + row, exp_sum + tl.sum(exp_parts, axis=0))
    tl.store(weighted_sum_ptr + row, weighted_sum + tl.sum(weighted_parts, axis=0))

    column = tl.load(target_ptr + row) - first_column
    is_here = (column >= 0) & (column < num_columns)
    target_y = tl.load(product_ptr + column, mask=is_here, other=0.0)
    if HAS_BIAS:
        target_y += tl.load(bias_ptr + column, mask=is_here, other=0.0)
    if HAS_CAP:
        target_y = _tanh(target_y)
    tl.store(target_y_ptr + row, target_y, mask=is_here)


@triton.jit
def logit_grads_kernel(
    product_ptr, bias_ptr, target_ptr, grad_ptr, max_ptr, at_target_ptr, per_e_ptr, per_e_d_ptr,
    stride_pm, stride_gm, num_columns, first_column, gain_out_bits,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`RowGrads` applied to one block of a row. Every entry is read before it is written: grad may be product."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < num_columns
    y = tl.load(product_ptr + row * stride_pm + offs_v, mask=mask_v, other=-float("inf"))  # [BLOCK_V]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0)
    if HAS_CAP:
        y = _tanh(y)

    bits = _bits_below_max(y, tl.load(max_ptr + row), gain_out_bits)
    per_e = tl.load(per_e_ptr + row)
    if HAS_ENTROPY:
        per_e = tl.fma(bits, tl.load(per_e_d_ptr + row), per_e)
    grad = tl.exp2(bits) * per_e
    if HAS_LOGPROB:
        column = tl.load(target_ptr + row) - first_column
        grad = tl.where(offs_v == column, grad + tl.load(at_target_ptr + row), grad)
    if HAS_CAP:
        grad = grad * (1.0 - y * y)
    tl.store(grad_ptr + row * stride_gm + offs_v, grad.to(grad_ptr.dtype.element_ty), mask=mask_v)


def add_to_sums_(sums: RunningSums, tile: ProductTile) -> None:
    """Add a tile to the sums of its rows, in place; the tile is left as it was."""
    m, v = tile.product_mv.shape
    with on_device_of(tile.product_mv):
        add_to_sums_kernel[(m,)](
            tile.product_mv,
            tile.bias_v,
            tile.target_m,
            sums.max_M,
            sums.exp_sum_M,
            sums.weighted_sum_M,
            sums.target_M,
            tile.product_mv.stride(0),
            v,
            tile.first_column,
            tile.transform.gain_out_bits,
            HAS_BIAS=tile.bias_v is not None,
            HAS_CAP=tile.transform.softcap is not None,
            BLOCK_V=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )


def write_logit_grads(tile: ProductTile, row_grads: RowGrads, out_mv: Tensor) -> None:
    """The gradient of (hidden @ weight.T + bias), but for the factor `slope`, rounded to out's dtype.

    out_mv: [m, v] with any row stride; the tile's own memory is allowed where it is fp32.
    """
    m, v = tile.product_mv.shape
    with on_device_of(tile.product_mv):
        logit_grads_kernel[(m, triton.cdiv(v, BLOCK_COLUMNS))](
            tile.product_mv,
            tile.bias_v,
            tile.target_m,
            out_mv,
            row_grads.max_M,
            row_grads.at_target_M,
            row_grads.per_e_M,
            row_grads.per_e_d_M,
            tile.product_mv.stride(0),
            out_mv.stride(0),
            v,
            tile.first_column,
            tile.transform.gain_out_bits,
            HAS_BIAS=tile.bias_v is not None,
            HAS_CAP=tile.transform.softcap is not None,
            HAS_LOGPROB=row_grads.at_target_M is not None,
            HAS_ENTROPY=row_grads.per_e_d_M is not None,
            BLOCK_V=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
