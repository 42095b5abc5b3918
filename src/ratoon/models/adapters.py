"""Low-rank adapters through peft, put into a transformers model in place: its class and its modules' names stay."""

# Shape letters: C input channels, K output channels of one layer.

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.pytorch_utils import Conv1D

from ratoon.models.config import LoraConfig
from ratoon.models.model_files import refusing
from ratoon.models.quantised import count_weights
from ratoon.types import UserError
from ratoon.types.extras import install_command

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""What peft puts before the names of an adapter's tensors in a file."""


def check_peft() -> None:
    """Raises UserError where peft is not installed, or is older than transformers takes."""
    if find_spec("peft") is None:
        raise UserError(f"model.lora needs the peft package: {install_command('lora')}")
    if Version(version("peft")) < Version(MIN_PEFT_VERSION):
        raise UserError(
            f"model.lora needs peft {MIN_PEFT_VERSION} or newer, and {version('peft')} is installed: "
            f"{install_command('lora')}"
        )


def has_adapters(model: nn.Module) -> bool:
    """Whether `add_adapters` has been called on the model."""
    return isinstance(model, PreTrainedModel) and model._hf_peft_config_loaded


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Freezes `model` and puts trainable adapters beside its layers, in place; returns it.

    The adapters have the model's dtype and device. They begin as nothing: their second matrices are 0, the first
    follow `seed` alone, and the global random state stays as it was.

    Raises UserError where peft is missing or `config` names what cannot be adapted (`lora_targets`).
    """
    check_peft()
    from peft import LoraConfig as PeftLoraConfig

    assert not has_adapters(model), "the model has adapters already"
    targets = lora_targets(model, config)
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        lora_dropout=0.0,
        target_modules=_shortest_names(model, targets),
        # GPT-2's layers hold their weight transposed.
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_adapter_seed(seed))
        model.add_adapter(settings, _ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:  # beside weights that are codes peft makes them in float32
            parameter.data = parameter.data.to(model.dtype)
    settings.base_model_name_or_path = None  # `save_adapters` says it
    adapted = {name for name, _ in adapted_layers(model)}
    assert adapted == set(targets), f"peft adapted other layers than {targets}: {sorted(adapted ^ set(targets))[:3]}"
    return model


def lora_targets(model: PreTrainedModel, config: LoraConfig) -> tuple[str, ...]:
    """Full names of the layers that `config.target_modules` means, in the model's order. Reads no weight.

    A name stands for each module whose own name it is ("q_proj"), or ends in it ("self_attn.q_proj").

    Raises UserError for names of no layer, of the output head or the embedding, whose weights are read directly,
    and of what is no linear layer, such as fused experts.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear = {name: module for name, module in model.named_modules() if _is_linear(module) and module is not head}
    if config.target_modules == "all-linear":
        return tuple(linear)
    for wanted in config.target_modules:
        if any(_matches(name, wanted) for name in linear):
            continue
        named = [module for name, module in model.named_modules() if _matches(name, wanted)]
        reason = "names no layer of the model"
        if any(module is head for module in named):
            reason = "is the output head, whose weight is read directly to score tokens"
        elif any(module is embedding for module in named):
            reason = "is the embedding, whose weight may be the output head's too"
        elif named:
            reason = f"is a {type(named[0]).__name__}, not a linear layer"
        elif any(_matches(name, wanted) for name, _ in model.named_parameters()):
            reason = "is a parameter of fused experts, not a linear layer"
        raise UserError(
            f"model.lora.target_modules: {wanted!r} {reason}, so it cannot be adapted; layers of "
            f"{type(model).__name__} that can: {', '.join(_layer_names(linear))}"
        )
    return tuple(name for name in linear if any(_matches(name, wanted) for wanted in config.target_modules))


def num_adapter_parameters(model: PreTrainedModel, config: LoraConfig) -> int:
    """How many parameters `add_adapters` would add. Reads no weight."""
    shapes = [_weight(model.get_submodule(target)).shape for target in lora_targets(model, config)]
    return sum(config.rank * (C + K) for C, K in shapes)


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside, a model with adapters computes as its frozen base does: the reference policy of a LoRA run.

    Twins that share its parameters (a rollout engine's) keep theirs on. Gradients of forward passes made before are
    unaffected. May be nested.
    """
    layers = [layer for _, layer in adapted_layers(model)]
    if not layers:
        raise ValueError(
            f"this {type(model).__name__} has no adapters to switch off; "
            "its reference is a frozen copy, made before training"
        )
    if are_adapters_off(model):
        yield model
        return
    # peft freezes what it switches off, and unfreezes everything it switches on.
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def are_adapters_off(model: nn.Module) -> bool:
    """Whether the model is inside `adapters_off`."""
    return any(layer.disable_adapters for _, layer in adapted_layers(model))


def describe_adapters(model: PreTrainedModel) -> str:
    """One line for logs: what is adapted, and how many parameters train."""
    layers = dict(adapted_layers(model))
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    num_all = count_weights(model)
    rank = _settings(model).r
    # A matrix for each expert in one tensor.
    num_fused = sum(parameter.ndim > 2 for parameter in model.parameters())
    frozen = "; fused experts stay frozen" if num_fused else ""
    return (
        f"LoRA of rank {rank} on {', '.join(_layer_names(layers))}: {num_trained:,} of {num_all:,} parameters train "
        f"({num_trained / num_all:.2%}){frozen}"
    )


def save_adapters(model: PreTrainedModel, folder: Path, *, base_path: str | None) -> None:
    """Writes the adapters alone, as peft does: `PeftModel.from_pretrained(base, folder)` reads them.

    base_path: what the file names as the base model; None where the base was made on the spot.
    """
    settings = copy(_settings(model))
    settings.base_model_name_or_path = base_path
    settings.save_pretrained(str(folder))
    tensors = {name: tensor.detach().contiguous() for name, tensor in _adapter_tensors(model).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Gives the model's adapters the values that `save_adapters` wrote, bit by bit, in place; returns it.

    Raises UserError where they are not those of this model.
    """
    saved = read_adapters(model, folder)
    _assign(_adapter_tensors(model), saved)
    return model


def read_adapters(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """What `save_adapters` wrote, on the model's device, for `adapters_as`.

    Raises UserError where they are not those of this model.
    """
    with refusing(folder, "adapter"):
        saved = load_file(folder / ADAPTER_WEIGHTS, device=str(model.device))
    own = _adapter_tensors(model)
    differing = sorted(own.keys() ^ saved.keys()) or sorted(
        name for name, tensor in own.items() if (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype)
    )
    if differing:
        raise UserError(
            f"the adapter in {str(folder)!r} does not fit the model: {len(differing)} of its tensors are missing or "
            f"of another shape or dtype, first {differing[0]}; give model and model.lora as they were in training"
        )
    return saved


@contextmanager
def adapters_as(model: PreTrainedModel, values: Mapping[str, Tensor]) -> Iterator[PreTrainedModel]:
    """Inside, the model's adapters hold `values` (`read_adapters`); afterwards their own again, bit by bit.

    Twins that share its parameters (a rollout engine's) see them too. A graph made before cannot be run backward after.
    """
    own = _adapter_tensors(model)
    kept = {name: tensor.detach().clone() for name, tensor in own.items()}
    try:
        _assign(own, values)
        yield model
    finally:
        _assign(own, kept)


@torch.no_grad()
def _assign(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def merge_adapters(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The base model with an adapter's product added to its weights, in their dtype; `base` is used up.

    The sum is rounded to that dtype once, so that a 16-bit model takes up changes of its own precision only.
    """
    check_peft()
    from peft import PeftModel

    with refusing(folder, "adapter"):
        merged = PeftModel.from_pretrained(base, folder).merge_and_unload(safe_merge=True)
    assert isinstance(merged, PreTrainedModel), f"peft unloaded a {type(merged).__name__}"
    return merged


def adapted_layers(model: nn.Module) -> "Iterator[tuple[str, BaseTunerLayer]]":
    """By name, the layers that hold a frozen base and adapters beside it."""
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _settings(model: PreTrainedModel) -> "PeftLoraConfig":
    from peft import LoraConfig as PeftLoraConfig

    settings = model.peft_config[_ADAPTER]
    assert isinstance(settings, PeftLoraConfig), f"the adapters are a {type(settings).__name__}'s"
    return settings


def _adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' own memory, under the names that files have."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    return {_PREFIX + name: tensor for name, tensor in tensors.items()}


def _shortest_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The layers' own names where they mean `targets` and nothing else, as other tools expect; else full names."""
    own = sorted({_last_name(target) for target in targets})
    meant = {name for name, _ in model.named_modules() if any(_matches(name, wanted) for wanted in own)}
    return own if meant == set(targets) else list(targets)


def _adapter_seed(seed: int) -> int:
    # Not the seed itself: a fresh model's weights are drawn from that.
    return int.from_bytes(hashlib.sha256(f"adapters {seed}".encode()).digest()[:7], "big")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Linear | Conv1D), f"a {type(module).__name__} is not adapted"
    return module.weight


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _layer_names(names: Iterable[str]) -> list[str]:
    """Each layer's own name once, in order."""
    return list(dict.fromkeys(_last_name(name) for name in names))
