"""The names and shapes that weights have in a checkpoint, which is what serving engines load by.

A transformers model may hold a checkpoint's tensors otherwise: a layer's experts as one tensor where the checkpoint has
one for each, tied weights once, parts renamed. An engine has a third form of its own (fused query, key and value), and
makes it from the checkpoint's names by itself.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ratoon.types import UserError


class WeightSyncError(RuntimeError):
    """An engine does not serve the weights that it was given; the message says which, or how it shows."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointNames:
    """Which tensors of a checkpoint each parameter of a model is, in the order in which they are sent."""

    model: PreTrainedModel
    """Whose configuration and class say how. No weight of it is read."""

    of_parameter: Mapping[str, tuple[str, ...]]
    """Parameter name -> its checkpoint names, at least one; more where it is cut apart (experts)."""

    shapes: Mapping[str, torch.Size]
    """Checkpoint name -> shape: all that an engine must be given, each once."""

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Mapping[str, torch.Size] | None = None) -> "CheckpointNames":
        """As `model.save_pretrained` would name them. No weight is read, and nothing is gathered.

        shapes: of the parameters by their names, whole; those of `model` itself when None. Give them where the model
        holds them otherwise than its class does (adapters beside them). Tied weights stand there once.

        Raises UserError for a model in whose checkpoint several parameters are one tensor: a bucket could not be made
        of one parameter at a time.
        """
        if shapes is None:
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        outlines = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        whole = {name: tensor.shape for name, tensor in revert_weight_conversion(model, outlines).items()}
        parts = {name: revert_weight_conversion(model, {name: outline}) for name, outline in outlines.items()}
        by_part = {name: tensor.shape for part in parts.values() for name, tensor in part.items()}
        if by_part != whole or sum(map(len, parts.values())) != len(whole):
            strange = sorted(whole.keys() ^ by_part.keys()) or sorted(whole)
            raise UserError(
                f"a checkpoint of {type(model).__name__} joins several of its parameters into one tensor "
                f"({strange[0]}), and weights are sent to engines one parameter at a time; "
                'use rollout.engine = "transformers"'
            )
        return cls(
            model=model,
            of_parameter={name: tuple(part) for name, part in parts.items()},
            shapes={name: by_part[name] for part in parts.values() for name in part},
        )

    def convert(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """The parameter `name` with the whole `value` as the checkpoint has it: views of it where that can be."""
        converted = revert_weight_conversion(self.model, {name: value})
        assert tuple(converted) == self.of_parameter[name], f"{name} became {sorted(converted)}"
        return converted


class WeightStream(Mapping[str, Tensor]):
    """A model's weights under checkpoint names, each made when it is read: nothing holds all of them at once.

    Iterate once, in order, and keep no more than you need: the parameter that was read last is held, no other. Where
    `value` gathers from several ranks, all of them iterate together, each to the end.
    """

    def __init__(self, names: CheckpointNames, value: Callable[[str], Tensor]) -> None:
        """value: the whole value of a parameter of `names`, on any device, in the dtype to send."""
        self._names = names
        self._value = value
        self._parameter_of = {each: name for name, parts in names.of_parameter.items() for each in parts}
        self._last: tuple[str, dict[str, Tensor]] | None = None

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Checkpoint name -> shape, known without reading a weight."""
        return self._names.shapes

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameter_of[name]
        if self._last is None or self._last[0] != parameter:
            self._last = None  # before the next one is made
            self._last = (parameter, self._names.convert(parameter, self._value(parameter)))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.shapes)

    def __len__(self) -> int:
        return len(self._names.shapes)


def check_same_names(wanted: Collection[str], got: Collection[str], *, giver: str, taker: str) -> None:
    """Raises WeightSyncError unless both hold the same names, with the first few of those that one of them lacks."""
    missing, unknown = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    if not missing and not unknown:
        return
    complaints = []
    if missing:
        complaints.append(f"{taker} was not given {_some(missing)}")
    if unknown:
        complaints.append(f"{taker} does not know {_some(unknown)}")
    raise WeightSyncError(f"weights of {giver}: {'; '.join(complaints)}. Nothing was sampled with them")


def _some(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
