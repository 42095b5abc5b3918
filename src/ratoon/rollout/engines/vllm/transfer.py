"""A way for weights into vLLM's own update session, in this process: tensors are handed over as they are."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
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

LoadWeights = Callable[[list[tuple[str, Tensor]]], Iterable[str]]


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nobody to meet."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of a checkpoint's tensors."""

    weights: list[tuple[str, Tensor]]


class InProcessTransfer(WeightTransferEngine[NoInit, Bucket]):
    """Of the shapes that vLLM 0.24 and the later ones want at once; `UpdateSession` makes the calls that differ."""

    init_info_cls = NoInit
    update_info_cls = Bucket

    loaded: frozenset[str] = frozenset()
    """Of vLLM's own parameters, those that some tensor of the session went into."""

    partial: tuple[str, ...] = ()
    """Of the last session, linear layers that got only a part of their numbers: a fused one without its keys, say."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Wanted by vLLM up to 0.26, and never called here: nothing is sent within a process."""
        raise NotImplementedError

    def begin(self) -> None:
        """Forget the session before."""
        self.loaded, self.partial = frozenset(), ()

    def start_weight_update(self) -> None:
        """Called by vLLM's worker, but for 0.24's, which does the same by itself."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket, load_weights: LoadWeights | None = None) -> None:
        """load_weights: the model's own, which vLLM 0.24 hands over."""
        load = self.model.load_weights if load_weights is None else load_weights
        self.loaded |= frozenset(load(update_info.weights))

    def note_partial(self) -> None:
        """While the layers are apart: how much each of them got."""
        self.partial = tuple(name for name, layer in self.model.named_modules() if _is_partial(layer))

    def finish_weight_update(self) -> None:
        """As `start_weight_update`."""
        finalize_layerwise_reload(self.model, self.model_config)

    def put_together(self, device: torch.device, model_config: Any) -> None:
        """What vLLM's worker does not do after a bucket that failed."""
        with device:
            finalize_layerwise_reload(self.model, model_config)

    def pack_tied(self) -> None:
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
