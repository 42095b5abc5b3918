"""Frozen linear weights in 4 bits (NF4), beneath adapters: QLoRA (arXiv:2305.14314), with bitsandbytes' kernels."""

# Shape letters: C input channels, K output channels of one layer.

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ratoon.models.base_model import remember_fingerprint
from ratoon.models.shape import model_shape
from ratoon.types import UserError
from ratoon.types.extras import install_command

_BLOCK = 64
"""Weights with one float32 scale, their largest magnitude."""


def check_four_bit() -> None:
    """Raises UserError where the library of 4-bit weights is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantization needs the bitsandbytes package: {install_command('qlora')}; or remove it")


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weight is two codes a byte, and a float32 scale for every 64 codes.

    The weight is made anew, in the input's dtype, for each product of the forward and of the backward pass: nothing but
    codes is kept for backward, and whoever calls it, trainer or rollout, computes with the same numbers.
    """

    weight_scales: Tensor

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """On `device`, where the weight is rounded; the bias is the layer's own."""
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        codes, scales = _codes_and_scales(linear.weight.detach().to(device))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scales", scales)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(
            input, self.weight, self.weight_scales, self.bias, self.out_features, self.in_features
        )  # fmt: skip

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features


class _Product(torch.autograd.Function):
    """Input times a weight that has codes, with the gradient of the input only."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, K: int, C: int) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = K, C
        return nn.functional.linear(input, _weight_KC(codes, scales, (K, C), input.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        return gradient @ _weight_KC(codes, scales, ctx.shape, gradient.dtype), *_NO_GRADS


_NO_GRADS = (None, None, None, None, None)
"""Of codes, scales, bias and the sizes: all of them frozen."""


def quantise(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Rounds every linear layer's weight but the output head's to NF4, in place, and returns the model.

    Layer by layer: never is more than one unrounded matrix on `device`. Embedding, head and norms stay where and as
    they are. `fingerprint_of` remains that of the weights before.

    Raises UserError where bitsandbytes is missing, and for models whose weights are elsewhere (`quantisable`).
    """
    check_four_bit()
    remember_fingerprint(model)
    for name, linear in list(quantisable(model)):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantisedLinear(linear, device))
    return model


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Gives the layers that `quantise` replaces the values it would give them, in their own dtype and in place."""
    check_four_bit()
    for _, linear in quantisable(model):
        codes, scales = _codes_and_scales(linear.weight)
        linear.weight.copy_(_weight_KC(codes, scales, (linear.out_features, linear.in_features), linear.weight.dtype))


def quantisable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """By name, the linear layers that `quantise` replaces. Reads no weight.

    Raises UserError for fused experts, which are no linear layers and most of a model, and for layers of other kinds.
    """
    shape = model_shape(model.config)
    if shape.num_experts:
        raise UserError(
            f"model.quantization: the {shape.num_experts} experts of {type(model).__name__} are not linear layers and "
            "would stay as they are; remove it"
        )
    head = model.get_output_embeddings()
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    linear = [(name, module) for name, module in found if module is not head]
    if not linear:
        raise UserError(f"model.quantization: {type(model).__name__} has no linear layer to round; remove it")
    yield from linear


def count_weights(model: nn.Module) -> int:
    """Weights of a model, however they are held; tied ones once."""
    packed = sum(
        module.num_weights - module.weight.numel() for module in model.modules() if isinstance(module, QuantisedLinear)
    )
    return packed + sum(parameter.numel() for parameter in model.parameters())


def _codes_and_scales(weight_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes a byte, and a scale a block."""
    codes, state = import_module("bitsandbytes").functional.quantize_4bit(
        weight_KC.contiguous(), blocksize=_BLOCK, quant_type="nf4"
    )
    return codes, state.absmax


def _weight_KC(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales, _BLOCK, "nf4", shape, dtype)
