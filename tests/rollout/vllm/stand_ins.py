"""vLLM as far as an update of its weights goes, in the shapes of three versions. No vLLM is needed.

Signatures, abstract methods and the order of calls are those of `distributed/weight_transfer/base.py` and `factory.py`,
`v1/worker/gpu_worker.py` and `entrypoints/llm.py` (0.32: `entrypoints/rl/offline.py`) in 0.24.0, 0.26.0 and 0.32.0.
"""

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

VERSIONS = ("0.24.0", "0.26.0", "0.32.0")
PACKAGE = "ratoon.rollout.engines.vllm"
Init = TypeVar("Init")
Update = TypeVar("Update")
ModelConfig = type("ModelConfig", (), {})


def fresh(monkeypatch: pytest.MonkeyPatch, name: str, stand_ins: dict[str, dict[str, Any]]) -> ModuleType:
    """Our module `name`, made anew over modules of vLLM that hold these names."""
    for path, names in stand_ins.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class FusedLinear(nn.Module):
    """Of a checkpoint's `q` and `k`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3))


class Model(nn.Module):
    """Loads checkpoints only while its layers are apart."""

    ROWS: ClassVar = {"q.weight": slice(0, 2), "k.weight": slice(2, 4)}

    def __init__(self) -> None:
        super().__init__()
        self.qk = FusedLinear()
        self.norm = nn.LayerNorm(3, bias=False)
        self.is_apart = False
        self.num_loaded = 0
        """Of the fused layer's numbers."""

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> set[str]:
        assert self.is_apart, "weights before the session has begun, or after its end"
        touched = set()
        for name, tensor in weights:
            if name in self.ROWS:
                self.qk.weight.data[self.ROWS[name]] = tensor
                self.num_loaded += tensor.numel()
                touched.add("qk.weight")
            else:
                self.get_parameter(name).data.copy_(tensor)
                touched.add(name)
        return touched


@dataclass
class LayerInfo:
    load_numel: int
    load_numel_total: int | None
    is_apart: bool

    def can_load(self) -> bool:
        return self.is_apart


@dataclass
class Reload:
    """`model_executor/model_loader/reload`."""

    model: Model
    model_config: object
    num_finalized: int = 0

    def initialize(self, model: Model) -> None:
        assert model is self.model and not model.is_apart, "layers were taken apart twice"
        model.is_apart, model.num_loaded = True, 0

    def finalize(self, model: Model, model_config: object) -> None:
        assert model is self.model and model_config is self.model_config
        assert model.is_apart, "layers were put together twice"
        model.is_apart = False
        self.num_finalized += 1

    def info(self, layer: nn.Module) -> LayerInfo:
        assert layer is self.model.qk
        return LayerInfo(self.model.num_loaded, self.model.qk.weight.numel(), self.model.is_apart)


class _Engine(ABC, Generic[Init, Update]):
    init_info_cls: type[Init]
    update_info_cls: type[Update]

    def parse_update_info(self, update_dict: dict[str, Any]) -> Update:
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: Init) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class _ReceivingEngine(_Engine[Init, Update]):
    """0.24.0's."""

    def __init__(self, config: object, parallel_config: object, model: Model) -> None:
        self.model = model

    @abstractmethod
    def receive_weights(
        self, update_info: Update, load_weights: Callable[[list[tuple[str, Tensor]]], None]
    ) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class _OwningEngine(_Engine[Init, Update]):
    """0.32.0's."""

    def __init__(self, config: object, vllm_config: Any, device: torch.device, model: Model) -> None:
        self.model, self.model_config = model, vllm_config.model_config

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Update) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))


class _OwningAndSendingEngine(_OwningEngine[Init, Update]):
    """0.26.0's."""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


@dataclass
class _KindOfUpdate:
    """0.24.0's `WeightTransferUpdateInfo`; later ones have no fields."""

    _: KW_ONLY
    update_kind: str = "dense"


@dataclass
class _NoKind:
    pass


@dataclass
class Worker(ABC):
    """What the two shapes share."""

    reload: Reload
    weight_transfer_engine: Any = None
    is_active: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def model_config(self) -> object:
        return self.reload.model_config

    @abstractmethod
    def make_engine(self, kind: Callable[..., Any]) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def check_is(self, active: bool) -> None:
        if self.is_active is not active:
            raise RuntimeError(f"a session is {'open' if self.is_active else 'not open'}")


class _LeadingWorker(Worker):
    """0.24.0's: takes the layers apart itself, and asks the engine only to receive."""

    def make_engine(self, kind: Callable[..., Any]) -> None:
        self.weight_transfer_engine = kind(object(), object(), self.reload.model)

    def start_weight_update(self) -> None:
        self.check_is(active=False)
        self.reload.initialize(self.reload.model)
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.check_is(active=True)
        engine = self.weight_transfer_engine
        self.is_active = False
        info = engine.parse_update_info(update_info)
        assert info.update_kind == "dense"
        engine.receive_weights(info, load_weights=self.reload.model.load_weights)
        self.is_active = True

    def finish_weight_update(self) -> None:
        self.check_is(active=True)
        self.reload.finalize(self.reload.model, self.model_config)
        self.is_active = False


class _AskingWorker(Worker):
    """0.26.0's and 0.32.0's."""

    def make_engine(self, kind: Callable[..., Any]) -> None:
        self.weight_transfer_engine = kind(object(), self, self.device, self.reload.model)

    def start_weight_update(self) -> None:
        self.check_is(active=False)
        self.weight_transfer_engine.start_weight_update()
        self.is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.check_is(active=True)
        self.is_active = False
        self.weight_transfer_engine.update_weights(update_info)
        self.is_active = True

    def finish_weight_update(self) -> None:
        self.check_is(active=True)
        self.weight_transfer_engine.finish_weight_update()
        self.is_active = False


@dataclass
class Llm:
    """`vllm.LLM` up to 0.26.0."""

    worker: Worker
    names: list[str] = field(default_factory=list[str])
    """Of the sessions that ended well."""

    def collective_rpc(self, method: Callable[[Worker], Any]) -> list[Any]:
        return [method(self.worker)]

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, request: dict[str, Any]) -> None:
        self.worker.update_weights(request["update_info"])

    def finish_weight_update(self) -> None:
        self.worker.finish_weight_update()


class _NamingLlm(Llm):
    """0.32.0's."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        super().finish_weight_update()
        assert weight_version is not None
        self.names.append(weight_version)


_SHAPES: dict[str, tuple[type[Any], type[Any], type[Worker], type[Llm]]] = {
    "0.24.0": (_ReceivingEngine, _KindOfUpdate, _LeadingWorker, Llm),
    "0.26.0": (_OwningAndSendingEngine, _NoKind, _AskingWorker, Llm),
    "0.32.0": (_OwningEngine, _NoKind, _AskingWorker, _NamingLlm),
}


def make_llm(monkeypatch: pytest.MonkeyPatch, version: str) -> Llm:
    """One that has our transfer engine, as this version makes it."""
    engine, update_info, worker_kind, llm_kind = _SHAPES[version]
    reload = Reload(Model(), ModelConfig())
    vllm = "vllm.distributed.weight_transfer"
    transfer = fresh(
        monkeypatch,
        "transfer",
        {
            f"{vllm}.base": {
                "WeightTransferEngine": engine,
                "WeightTransferInitInfo": _NoKind,
                "WeightTransferUpdateInfo": update_info,
            },
            f"{vllm}.factory": {"WeightTransferEngineFactory": type("Factory", (), {"_registry": {}})},
            "vllm.model_executor.layers.linear": {"LinearBase": FusedLinear},
            "vllm.model_executor.model_loader.reload": {
                "initialize_layerwise_reload": reload.initialize,
                "finalize_layerwise_reload": reload.finalize,
            },
            "vllm.model_executor.model_loader.reload.layerwise": {"get_layerwise_info": reload.info},
        },
    )
    worker = worker_kind(reload)
    worker.make_engine(transfer.InProcessTransfer)
    return llm_kind(worker)
