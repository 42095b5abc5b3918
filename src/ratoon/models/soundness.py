"""Which weights are NaN or infinite: those of a policy that its last updates have spoilt."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ratoon.types.errors import UserError


class SpoiltModelError(UserError):
    """A model whose weights are not finite, or whose logits are not: nothing can be drawn from it, or learnt."""


def spoilt_weights(named: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Names of the tensors, all on one device, that hold NaN or infinity. Each is read once, and nothing is copied.

    Integers, and codes of 8 bits and fewer, are always finite.
    """
    names: list[str] = []
    ranges: list[Tensor] = []
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel():
            names.append(name)
            ranges.append(torch.stack(torch.aminmax(tensor.detach())).double())  # NaN where one of them is
    if not names:
        return ()
    are_finite = torch.stack(ranges).isfinite().all(dim=1).tolist()  # one wait for the device
    return tuple(name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite)


def spoilt_in_folder(folder: Path) -> tuple[str, ...]:
    """`spoilt_weights` of a model folder's safetensors files; one tensor at a time is in memory."""
    return tuple(name for named in _saved_tensors(folder) for name in spoilt_weights([named]))


def describe_spoilt(names: Sequence[str]) -> str:
    """In words for a message that names the model before."""
    return f"weights that are NaN or infinite, in {len(names)} of its tensors, first {names[0]}"


def _saved_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
