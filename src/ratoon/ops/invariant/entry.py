"""Linear layers, means and log-probs of a row that are the same bits in every batch."""

# A Triton launch takes a kernel's runtime arguments, its constants and the compiler's options in one call.
# pyright: reportCallIssue=false

# Shape letters: M rows, N columns of a product, K what a product sums over, C channels, V vocabulary.

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.ops.invariant.kernels import matmul_kernel, row_mean_kernel, score_kernel
from ratoon.ops.launch import on_device_of
from ratoon.ops.sampling.entry import VOCABULARY_TILE
from ratoon.ops.sampling.kernels import tile_sums_kernel

ALIGNMENT_BYTES = 16
"""Loads of this many bytes need addresses that are multiples of it; a kernel is compiled anew for others."""


@dataclass(frozen=True, slots=True)
class MatmulBlocks:
    """The one configuration for all numbers of rows."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


_INTERPRETED = MatmulBlocks(64, 256, 128, 4, 1)
"""For the interpreter, for which large tiles are fast."""

_GROUP_M = 8
_MEAN_ELEMENTS = 2048
"""Of the rows that one program takes the means of, at least one."""

_OF_16_BITS = MatmulBlocks(64, 128, 64, 4, 3)
_OF_32_BITS = MatmulBlocks(32, 64, 32, 4, 2)
"""Float32 is multiplied without tensor cores: larger tiles take long to compile."""


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, [..., K] -> [..., N] in x's dtype, with sums in float32; once differentiable.

    x and weight have one dtype of bf16, fp16 and fp32. The backward pass is torch's own matrix products.
    """
    return _Linear.apply(x, weight_NK, bias_N)


def matmul(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias: [M, N] in `out_dtype`, rounded once from float32 sums. No graph is kept."""
    if x_MK.dtype != weight_NK.dtype or x_MK.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            "a batch-invariant product takes inputs and weights of one dtype of bfloat16, float16 and float32, got "
            f"{x_MK.dtype} and {weight_NK.dtype}"
        )
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    if out_MN.numel() == 0:
        return out_MN
    blocks = _OF_32_BITS if x_MK.dtype == torch.float32 else _OF_16_BITS
    blocks = blocks if x_MK.is_cuda else _INTERPRETED
    with on_device_of(x_MK):
        matmul_kernel[(triton.cdiv(M, blocks.m) * triton.cdiv(N, blocks.n),)](
            _aligned(x_MK), _aligned(weight_NK), None if bias_N is None else _aligned(bias_N), out_MN, M, N, K,
            HAS_BIAS=bias_N is not None, UPCAST=_upcast(x_MK),
            BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, GROUP_M=_GROUP_M,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out_MN


def row_mean(x: Tensor) -> Tensor:
    """`x.mean(-1, keepdim=True)`: [..., C] -> [..., 1] in x's dtype, summed in float32; differentiable."""
    return _RowMean.apply(x)


def score_tokens(logits_MV: Tensor, token_M: Tensor, temperature_M: Tensor) -> Tensor:
    """Log-prob [M] float32 of each row's token; 0 at temperature 0. By the arithmetic of `ops.sampling.draw_tokens`.

    logits_MV: [M, V] float32. token_M: [M] int64 in [0, V). temperature_M: [M] float64.
    """
    M, V = logits_MV.shape
    logprob_M = logits_MV.new_empty(M, dtype=torch.float32)
    if M == 0:
        return logprob_M
    logits_MV = _aligned(logits_MV)
    num_tiles = -(-V // VOCABULARY_TILE)
    highest = logits_MV.new_empty(M, num_tiles, dtype=torch.float32)
    sums = logits_MV.new_empty(M, num_tiles, dtype=torch.float64)
    likeliest = logits_MV.new_empty(M, num_tiles, dtype=torch.int32)
    with on_device_of(logits_MV):
        tile_sums_kernel[(M, num_tiles)](
            logits_MV, temperature_M, highest, sums, likeliest, V, V, num_tiles, TILE=VOCABULARY_TILE, num_warps=8
        )
        score_kernel[(M,)](
            logits_MV, temperature_M, token_M, highest, sums, logprob_M, V, num_tiles,
            BLOCK_N=1 << max(num_tiles - 1, 1).bit_length(), num_warps=8,
        )  # fmt: skip
    return logprob_M


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight_NK if needs_x else None)
        ctx.shape = x.shape
        out_MN = matmul(x.reshape(-1, x.shape[-1]), weight_NK, bias_N, out_dtype=x.dtype)
        return out_MN.view(*x.shape[:-1], weight_NK.shape[0])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad_x = (grad_MN @ weight_NK).view(ctx.shape) if needs_x else None
        grad_weight = grad_MN.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return grad_x, grad_weight, grad_MN.sum(0) if needs_bias else None


class _RowMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        C = ctx.num_channels = x.shape[-1]
        mean = x.new_empty(*x.shape[:-1], 1)
        num_rows = mean.numel()
        if num_rows:
            width = triton.next_power_of_2(C)
            height = max(1, _MEAN_ELEMENTS // width)
            with on_device_of(x):
                row_mean_kernel[(triton.cdiv(num_rows, height),)](
                    _aligned(x), mean, num_rows, C=C, BLOCK_M=height, BLOCK_C=width, num_warps=4
                )
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grad / ctx.num_channels).expand(*grad.shape[:-1], ctx.num_channels)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an aligned address."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()


def _upcast(tensor: Tensor) -> bool:
    """The interpreter multiplies the bit patterns of bf16 numbers."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
