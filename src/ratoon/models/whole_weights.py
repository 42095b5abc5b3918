"""A policy's weights one at a time, as its class without adapters would hold them: whole, merged, in one dtype."""

# Shape letters: C input channels, K output channels, R rank of the adapters of one layer.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ratoon.models.adapters import adapted_layers
from ratoon.models.quantised import QuantisedLinear
from ratoon.types import UserError

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclass(frozen=True, slots=True, eq=False)
class WholeWeights:
    """Names and shapes at once, each value when it is asked for."""

    shapes: Mapping[str, torch.Size]
    """Parameter name -> shape, in the model's order; tied weights once, adapters not at all."""

    values: Mapping[str, Callable[[], Tensor]]
    """Parameter name -> what makes its whole value, in the dtype asked for."""

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> "WholeWeights":
        """Reads no weight yet.

        A weight that is cut over ranks is cast to `dtype` before it is gathered, on its device: all ranks ask for the
        same weights in the same order. An adapter's product is added to its layer's weight in float32 and rounded to
        `dtype` once, so that changes below its precision are lost. Values that are whole and of that dtype already
        share the model's memory.

        Raises UserError for weights in 4 bits, which no engine loads as they are.
        """
        if any(isinstance(module, QuantisedLinear) for module in model.modules()):
            raise UserError(
                "model.quantization keeps the base in codes that this rollout engine cannot take; remove it, or use "
                'rollout.engine = "transformers"'
            )
        prefixes = {f"{name}.": layer for name, layer in adapted_layers(model)}
        shapes: dict[str, torch.Size] = {}
        values: dict[str, Callable[[], Tensor]] = {}
        for name, parameter in model.named_parameters():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix is None:
                shapes[name], values[name] = parameter.shape, partial(_whole, parameter, dtype)
                continue
            inside, _, own = name.removeprefix(prefix).rpartition(".")
            if inside != "base_layer":  # the adapter itself
                continue
            make = partial(_merged, prefixes[prefix], dtype) if own == "weight" else partial(_whole, parameter, dtype)
            shapes[prefix + own], values[prefix + own] = parameter.shape, make
        return cls(shapes, values)

    def value(self, name: str) -> Tensor:
        """The whole value of the parameter `name`."""
        return self.values[name]()


@torch.no_grad()
def _whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    value = parameter.detach().to(dtype)
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def _merged(layer: "BaseTunerLayer", dtype: torch.dtype) -> Tensor:
    """The base's weight [K, C] and the adapters' product; of layers that hold it the other way round, so."""
    from peft.tuners.lora import LoraLayer

    assert isinstance(layer, LoraLayer), f"a {type(layer).__name__} holds no low-rank adapters"
    merged = layer.get_base_layer().get_parameter("weight").detach().float()
    for adapter in layer.active_adapters:
        A_RC, B_KR = (each[adapter].get_parameter("weight").float() for each in (layer.lora_A, layer.lora_B))
        product_KC = layer.scaling[adapter] * (B_KR @ A_RC)
        merged = merged + (product_KC.T if vars(layer).get("fan_in_fan_out") else product_KC)
    return merged.to(dtype)
