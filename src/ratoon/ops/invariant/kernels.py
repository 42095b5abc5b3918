"""Kernels that compute each row by the same instructions in the same order, however many rows there are.

No tile size, no split and no order of sums depends on the number of rows, and the compiled code does not either: the
number of rows is not specialised on, and callers hand over contiguous tensors at aligned addresses.
"""

# Type checkers take a kernel's functions for ones that never return.
# pyright: reportGeneralTypeIssues=false

# Shape letters: M rows, N columns of a product, K what a product sums over, C channels, V vocabulary, m, n, k: one
# tile of them.

import triton
import triton.language as tl

from ratoon.ops.sampling.kernels import combine_tiles


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of x @ weight.T + bias, K in its order. All are contiguous: x [M, K], weight [N, K], out [M, N]."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # Programs that run at the same time share tiles of rows and of weights.
    band = tl.program_id(0) // (GROUP_M * num_n)
    place = tl.program_id(0) % (GROUP_M * num_n)
    band_height = tl.minimum(num_m - band * GROUP_M, GROUP_M)
    tile_m, tile_n = band * GROUP_M + place % band_height, place // band_height

    # int64: row * K passes 2**31 once M * K does
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m < M, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    weight_ptrs = weight_ptr + offs_n[:, None] * K + offs_k[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_k in range(0, K, BLOCK_K):
        mask_k = first_k + offs_k < K
        x = tl.load(x_ptrs + first_k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [m, k]
        weight = tl.load(weight_ptrs + first_k, mask=mask_n[:, None] & mask_k[None, :], other=0.0)  # [n, k]
        if UPCAST:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["M"])
def row_mean_kernel(x_ptr, mean_ptr, M, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """The means of a few rows of a contiguous x [M, C], each summed in float32 by itself."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tl.arange(0, BLOCK_C)
    mask = (offs_m < M)[:, None] & (offs_c < C)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * C + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)  # [m, C]
    tl.store(mean_ptr + offs_m, (tl.sum(x, axis=1) / C).to(mean_ptr.dtype.element_ty), mask=offs_m < M)


@triton.jit
def score_kernel(
    logits_ptr, temperature_ptr, token_ptr, highest_ptr, sums_ptr, logprob_ptr, V, num_tiles, BLOCK_N: tl.constexpr
):
    """One row's log-prob of a token that is given: what `sampling.kernels.draw_kernel` says of one it draws."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    highest, _, _, total = combine_tiles(highest_ptr, sums_ptr, row, num_tiles, scale, BLOCK_N)
    logit = tl.load(logits_ptr + row.to(tl.int64) * V + tl.load(token_ptr + row)).to(tl.float32)
    logprob = (logit.to(tl.float64) - highest) * scale - tl.log(total)
    tl.store(logprob_ptr + row, tl.where(temperature == 0.0, total * 0.0, logprob).to(tl.float32))
