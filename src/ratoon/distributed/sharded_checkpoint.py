"""Weights and optimizer state in one folder, written by every rank, read by any number of ranks."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ratoon.distributed.sharded import reshard
from ratoon.types import UserError

_WEIGHTS, _OPTIMIZER = "model/", "optimizer/"


Masters = Mapping[nn.Parameter, Tensor]
"""The tensors that an optimizer trains in the place of a model's parameters, and that are copied to these."""


def save_sharded(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    masters: Masters | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Every rank writes its parts of weights, persistent buffers and optimizer state to `folder`.

    A folder that all ranks see. All ranks must call it together; it returns once the files of all are on disk. It is
    not atomic: write to another name, then rename. Settings of the optimizer (rates) are not in it. Where a rank cannot
    write, every rank raises what the first of them failed with.
    masters: written instead of the parameters they stand for.
    process_group: for the ranks' agreement; None is the default group.
    """
    reshard(model)
    trained = _trained(model, masters)
    state = {**_weights(model, trained), **_optimizer_tensors(trained, optimizer)}
    try:
        with _alone_is_meant():
            save(state, checkpoint_id=folder, process_group=process_group, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # no Exception, and a page of tracebacks
        failures = [failure for failure, _ in error.failures.values()]
        raise failures[0] from error


def load_sharded(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    masters: Masters | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fills model and optimizer, in place, with what `save_sharded` wrote, whatever the number of ranks was.

    The optimizer holds parameters of `model`, or their masters; afterwards it has the state that was saved, and none if
    there was none. masters: filled instead of the parameters they stand for, which stay as they are.
    Read only folders of your own runs: the library's index is a pickle.

    Raises UserError where the folder holds another model.
    """
    reshard(model)
    reader = FileSystemReader(folder)
    if not (Path(folder) / ".metadata").is_file():
        raise UserError(f"{str(folder)!r} holds no sharded checkpoint, or one whose writing did not end")
    saved = reader.read_metadata().state_dict_metadata
    trained = _trained(model, masters)
    weights = _weights(model, trained)
    _check_same_model(weights, saved, folder)
    moments = _empty_moments(trained, optimizer, saved)
    with _alone_is_meant():
        load(
            {**weights, **moments},
            storage_reader=reader,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    _give_state(trained, optimizer, moments)


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _trained(model: nn.Module, masters: Masters | None) -> dict[str, Tensor]:
    """By the parameter's name, what the optimizer trains, or would: the parameter or its master. Tied ones once."""
    return {name: (masters or {}).get(parameter, parameter) for name, parameter in model.named_parameters()}


def _weights(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sharing memory with the model or its masters."""
    persistent = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    tensors = {name: tensor.detach() for name, tensor in trained.items()} | buffers
    return {_WEIGHTS + name: tensor for name, tensor in tensors.items()}


def _optimizer_tensors(trained: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in trained.items():
        for key, value in optimizer.state.get(tensor, {}).items():
            tensors[f"{_OPTIMIZER}{name}/{key}"] = value
    held = sum(len(state) for state in optimizer.state.values())
    assert len(tensors) == held, f"the optimizer holds state of {held - len(tensors)} tensors outside of the model"
    return tensors


def _check_same_model(weights: Mapping[str, Tensor], saved: Mapping[str, Any], folder: Path) -> None:
    shapes = {name: tuple(entry.size) for name, entry in saved.items() if name.startswith(_WEIGHTS)}
    differing = sorted(
        name for name in weights.keys() | shapes.keys()
        if name not in weights or shapes.get(name) != tuple(weights[name].shape)
    )  # fmt: skip
    if differing:
        raise UserError(
            f"the checkpoint in {str(folder)!r} is of another model: {len(differing)} tensors missing, left over or "
            f"of another shape, first {differing[0].removeprefix(_WEIGHTS)}; give the model that the run began with"
        )


def _empty_moments(trained: Mapping[str, Tensor], optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Room for the saved optimizer state, cut as the parameters are."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: tensor for name, tensor in trained.items() if tensor in held}
    room: dict[str, Tensor] = {}
    for place, entry in saved.items():
        if not place.startswith(_OPTIMIZER):
            continue
        name, _, _ = place.removeprefix(_OPTIMIZER).rpartition("/")
        if name not in parameters:
            raise UserError(
                f"the checkpoint holds optimizer state of {name}, which this optimizer does not train; "
                "resume with the settings that the run began with"
            )
        assert isinstance(entry, TensorStorageMetadata), f"{place} is no tensor"
        parameter, dtype = parameters[name], entry.properties.dtype
        is_like_weight = entry.size == parameter.shape
        room[place] = (
            torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if is_like_weight
            else torch.zeros(entry.size, dtype=dtype)
        )
    return room


def _give_state(trained: Mapping[str, Tensor], optimizer: Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Through the optimizer's own loading, which puts step counts where its implementation wants them."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for place, value in moments.items():
        name, _, key = place.removeprefix(_OPTIMIZER).rpartition("/")
        by_name.setdefault(name, {})[key] = value
    names = {tensor: name for name, tensor in trained.items()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: by_name[name] for index, name in enumerate(in_order) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
