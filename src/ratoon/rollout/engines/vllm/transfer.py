"""A way for weights into vLLM's own update session, in this process: tensors are handed over as they are."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.linear import LinearBase  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # pyright: ignore[reportMissingImports]

BACKEND = "ratoon"


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nobody to meet."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of a checkpoint's tensors."""

    weights: list[tuple[str, Tensor]]


class InProcessTransfer(WeightTransferEngine[NoInit, Bucket]):
    """One session: `start`, any number of buckets, `finish`. Fused and cut weights may come in several buckets."""

    init_info_cls = NoInit
    update_info_cls = Bucket

    loaded: frozenset[str] = frozenset()
    """Of vLLM's own parameters, those that some tensor of the session went into."""

    partial: tuple[str, ...] = ()
    """Of the last session, linear layers that got only a part of their numbers: a fused one without its keys, say."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self.loaded = frozenset()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket) -> None:
        """Raises whatever vLLM raises for a tensor that it does not know, or of another shape."""
        self.loaded |= frozenset(self.model.load_weights(update_info.weights))

    def finish_weight_update(self) -> None:
        self.partial = tuple(name for name, layer in self.model.named_modules() if _is_partial(layer))
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_again(self.model)

    def shutdown(self) -> None:
        pass

    @property
    def missing(self) -> list[str]:
        """vLLM's parameters that the session did not touch (tied ones have one name), and layers it left half done."""
        return sorted({name for name, _ in self.model.named_parameters()} - self.loaded | set(self.partial))


def _is_partial(layer: nn.Module) -> bool:
    if not isinstance(layer, LinearBase):
        return False  # an embedding may have rows that nothing fills
    info = get_layerwise_info(layer)
    total = info.load_numel_total
    return info.can_load() and total is not None and 0 < info.load_numel < total


def register() -> None:
    """Makes the backend known to vLLM, once in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcessTransfer)


def pack_tied_again(model: nn.Module) -> None:
    """On a CPU vLLM multiplies with packed copies of weights, and after an update packs those of layers that were
    loaded. An output head tied to the embedding is loaded through that, so its copy would stay the old one."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    for module in (each for tied in holders.values() if len(tied) > 1 for each in tied):
        own: dict[str, Any] = vars(module)
        if "cpu_linear" in own:
            own["quant_method"].process_weights_after_loading(module)
