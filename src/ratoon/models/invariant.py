"""Batch-invariant models: every row of a pass is computed by the same operations in the same order, whatever else is in
the pass.

Products, means and attention are kernels of `ops.invariant` and `attention.invariant`; whatever else a dense decoder
does, it does number by number, as torch does it without a compiler.
"""

# Shape letters: R rows of a pass, M scored tokens, V vocabulary, C channels.

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ratoon.attention.specs import device_types_of, spec_named, why_not_here
from ratoon.models.shape import model_shape
from ratoon.types import UserError

IMPL = "invariant"
"""What `forest_attention` is asked for."""

_MOST_LOGITS = 1 << 28
"""Float32 logits that are scored at a time: 1 GiB."""


class InvariantLinear(nn.Linear):
    """Mixed into a linear layer's class, which stays a subclass of it: names, adapters and sharding see what was."""

    def forward(self, input: Tensor) -> Tensor:
        from ratoon.ops.invariant.entry import linear  # needs triton

        return linear(input, self.weight, self.bias)


class InvariantNorm(nn.Module):
    """Mixed into a norm's class: the norm's own arithmetic, with means over the last dim by our kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _RowMeans(type(self).__name__):
            return super().forward(*args, **kwargs)


def make_invariant(model: PreTrainedModel) -> PreTrainedModel:
    """Makes the modules of a dense decoder batch-invariant, in place; again after modules were added, as adapters are.

    Before recomputation is set and before the model is sharded. Raises UserError as `check_can_be_invariant` and
    `check_machine` do, and for a module with weights whose arithmetic is not known.
    """
    check_can_be_invariant(model_shape(model.config).num_experts)
    check_machine(model.device)
    kinds = [(module, _kind_of(name, module)) for name, module in model.named_modules()]
    for module, kind in kinds:
        if kind is not None and not isinstance(module, kind):
            _change_class(module, _mixed(kind, type(module)))
    return model


def make_plain(model: PreTrainedModel) -> None:
    """Undoes `make_invariant`, in place, before anything else was mixed into the modules' classes."""
    for module in model.modules():
        if isinstance(module, InvariantLinear | InvariantNorm):
            _change_class(module, type(module).__mro__[2])


def check_can_be_invariant(num_experts: int) -> None:
    """Raises UserError for a model with experts, whose products are none of ours."""
    if num_experts:
        raise UserError(
            f"model.batch_invariant is for dense models, and this one has {num_experts} experts a layer, whose "
            "products depend on how many tokens each expert gets; set model.batch_invariant to false"
        )


def check_machine(device: torch.device) -> None:
    """Raises UserError where the kernels cannot run, as on a CPU."""
    why_not = why_not_here(IMPL)
    device_types = device_types_of(spec_named(IMPL))
    if why_not is None and device_types is not None and device.type not in device_types:
        why_not = f"the model is on {device}"
    if why_not is not None:
        raise UserError(
            f"model.batch_invariant computes with Triton kernels on a GPU, which cannot run here: {why_not}; train on "
            "a GPU, or set model.batch_invariant to false"
        )


def invariant_logits(hidden_RC: Tensor, head: nn.Linear) -> Tensor:
    """[R, V] float32, before the model's own scale and cap."""
    from ratoon.ops.invariant.entry import matmul  # needs triton

    return matmul(hidden_RC, head.weight, head.bias, out_dtype=torch.float32)


def invariant_logprobs(
    logits_of: Callable[[Tensor], Tensor], hidden_MC: Tensor, target_M: Tensor, temperature: float, vocab_size: int
) -> Tensor:
    """[M] float32 log-probs of the targets, without a graph, as the engine draws them. logits_of: [R, C] -> [R, V]."""
    from ratoon.ops.invariant.entry import score_tokens  # needs triton

    num_rows = max(1, _MOST_LOGITS // vocab_size)
    logprob_M = hidden_MC.new_empty(hidden_MC.shape[0], dtype=torch.float32)
    target_M = target_M.to(torch.int64)
    with torch.no_grad():
        for start in range(0, hidden_MC.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            logits_RV = logits_of(hidden_MC[rows])
            temperature_R = torch.full(logits_RV.shape[:1], temperature, dtype=torch.float64, device=logits_RV.device)
            logprob_M[rows] = score_tokens(logits_RV, target_M[rows], temperature_R)
    return logprob_M


def with_value_of(logprobs_M: Tensor, value_M: Tensor) -> Tensor:
    """`value_M`, whose gradient goes to `logprobs_M`: the same numbers but for rounding."""
    return _WithValue.apply(logprobs_M, value_M)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs_M: Tensor, value_M: Tensor) -> Tensor:
        return value_M.clone()

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_M, None


class _RowMeans(TorchFunctionMode):
    """Inside, means over the last dim are ours, and so are the norms that torch would take them in."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.mean, Tensor.mean):
            return self._mean(*args, **kwargs)
        if func in (functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        if func in (functional.layer_norm, torch.layer_norm):
            return _layer_norm(*args, **kwargs)
        if func in _OTHER_SUMS:
            raise UserError(
                f"{self._name} calls {getattr(func, '__name__', func)}, whose order of sums is torch's to choose; set "
                "model.batch_invariant to false for this model"
            )
        return func(*args, **kwargs)

    def _mean(self, x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None):
        from ratoon.ops.invariant.entry import row_mean  # needs triton

        if dim not in (-1, x.ndim - 1):
            raise UserError(
                f"{self._name} takes a mean over dim {dim} of {list(x.shape)}, and the batch-invariant one is over the "
                "last; set model.batch_invariant to false for this model"
            )
        mean = row_mean(x if dtype is None else x.to(dtype))
        return mean if keepdim else mean.squeeze(-1)


_OTHER_SUMS = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("sum", "var", "std", "norm", "var_mean", "std_mean")
    if hasattr(owner, name)
) | {torch.linalg.vector_norm, functional.group_norm, functional.normalize}


def _rms_norm(
    x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """As `torch.nn.functional.rms_norm` over the last dim, in float32."""
    from ratoon.ops.invariant.entry import row_mean  # needs triton

    assert len(normalized_shape) == 1, f"a norm over {len(normalized_shape)} dims"
    wide = x.float()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(row_mean(wide * wide) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def _layer_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """As `torch.nn.functional.layer_norm` over the last dim, in float32."""
    from ratoon.ops.invariant.entry import row_mean  # needs triton

    assert len(normalized_shape) == 1, f"a norm over {len(normalized_shape)} dims"
    wide = x.float()
    centred = wide - row_mean(wide)
    normed = centred * torch.rsqrt(row_mean(centred * centred) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def _kind_of(name: str, module: nn.Module) -> type[nn.Module] | None:
    """What is mixed into a module's class. Raises UserError for one that computes with its weights in another way."""
    if isinstance(module, InvariantLinear | InvariantNorm):
        return None
    if "Norm" in type(module).__name__:
        return InvariantNorm
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return InvariantLinear
    if isinstance(module, nn.Embedding) or not any(True for _ in _own_weights(module)):
        return None
    raise UserError(
        f"model.batch_invariant does not know how {type(module).__name__} ({name}) computes with its weights; it takes "
        "decoders of linear layers, embeddings and norms. Set model.batch_invariant to false for this model"
    )


def _own_weights(module: nn.Module) -> Iterator[Tensor]:
    if isinstance(module, nn.ParameterDict | nn.ParameterList):
        return iter(())  # of a module that computes with them; peft's are empty for linear layers
    return module.parameters(recurse=False)


def _change_class(module: nn.Module, to: type[nn.Module]) -> None:
    module.__class__ = to


@cache
def _mixed(kind: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    # The name stays: sharding and hooks find layers by it.
    return type(plain.__name__, (kind, plain), {"__module__": plain.__module__})
