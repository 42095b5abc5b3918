"""How the processes of a run share its microbatches: each has some by itself, or with the others of its group."""

from dataclasses import dataclass

import torch

from ratoon.config.recipe import Recipe
from ratoon.distributed import DataParallel, SequenceGroup, ranks_mesh, sequence_group
from ratoon.models import preview_model
from ratoon.types.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Data ranks, which have different microbatches, times sequence ranks, which hold one together."""

    num_ranks: int
    degree: int
    """`trainer.sequence_parallel`."""

    def __post_init__(self) -> None:
        assert self.num_ranks % self.degree == 0, f"{self.num_ranks} ranks in groups of {self.degree}"

    @classmethod
    def of(cls, recipe: Recipe, num_ranks: int) -> "MeshShape":
        """Raises UserError where the recipe's degree divides the ranks or the model's heads unevenly, with those that
        would do. Of the model, its configuration is read."""
        degree = recipe.trainer.sequence_parallel
        if degree > 1:
            _check(degree, num_ranks, num_heads=preview_model(recipe.model).shape.num_heads)
        return cls(num_ranks=num_ranks, degree=degree)

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // self.degree

    @property
    def axes(self) -> str | None:
        """In words; None where each rank is a data rank."""
        if self.degree == 1:
            return None
        data = f"{self.num_data_ranks} data rank{'' if self.num_data_ranks == 1 else 's'}"
        return f"{data} x {self.degree} sequence ranks"


def join_sequence_group(recipe: Recipe, ranks: DataParallel, device: torch.device) -> SequenceGroup | None:
    """The ranks that hold this one's microbatches with it; None: it has them to itself. All ranks call it together.

    The recipe's degree is one that `MeshShape.of` has let pass.
    """
    degree = recipe.trainer.sequence_parallel
    if degree == 1:
        return None
    return sequence_group(ranks_mesh(device.type, degree), timeout_s=ranks.timeout_s)


def _check(degree: int, num_ranks: int, *, num_heads: int) -> None:
    key = f"trainer.sequence_parallel = {degree}"
    if num_ranks == 1:
        raise UserError(
            f"{key} shares each microbatch out over {degree} processes, and this run has one; start more with "
            "trainer.num_processes or torchrun (`ratoon plan` takes --gpus K), or set it to 1"
        )
    whole = (num_ranks, num_heads)
    names = (f"the {num_ranks} processes of this run", f"the {num_heads} attention heads of the model")
    uneven = [name for name, count in zip(names, whole, strict=True) if count % degree]
    if uneven:
        known = [each for each in range(1, num_ranks + 1) if all(count % each == 0 for count in whole)]
        raise UserError(
            f"{key} does not divide {' nor '.join(uneven)}, which are shared out evenly; "
            f"with {num_ranks} processes and {num_heads} heads it can be {', '.join(map(str, known))}"
        )
