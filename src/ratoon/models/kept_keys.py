"""What rows that come after a prompt read of it: keys and values of each layer, and the last row's hidden state."""

# Shape letters: P rows of the prompt, T rows of a later pass, H key and value heads, D head dim, E value head dim,
# C channels.

from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor


class KeptKeys:
    """What one pass of a prompt left. Later passes read leaves of their own, where gradients gather."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        """P."""

        self.last_hidden_1C: Tensor | None = None
        """Predicts the first token of every response."""

        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, module: nn.Module, k_PHD: Tensor, v_PHE: Tensor) -> None:
        """What an attention layer reads. A layer that is computed again for backward brings the same once more."""
        layer = _layer_of(module)
        if layer not in self._made:
            self._made[layer] = k_PHD, v_PHE
            self._leaves[layer] = leaf_of(k_PHD), leaf_of(v_PHE)

    def before(self, module: nn.Module, k_THD: Tensor, v_THE: Tensor) -> tuple[Tensor, Tensor]:
        """[P + T, H, D] and [P + T, H, E]: the prompt's in front."""
        k_PHD, v_PHE = self._leaves[_layer_of(module)]
        return torch.cat([k_PHD, k_THD]), torch.cat([v_PHE, v_THE])

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor as its pass made it, and the leaf that stands for it."""
        for layer, made in self._made.items():
            yield from zip(made, self._leaves[layer], strict=True)


def leaf_of(made: Tensor) -> Tensor:
    """A leaf with the same numbers, whose gradient can be handed to `made`."""
    return made.detach().requires_grad_(made.requires_grad)


def _layer_of(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError(
            f"{type(module).__name__} does not know the number of its layer (layer_idx), by which a prompt's keys and "
            "values are kept; compute the prompt with each microbatch instead"
        )
    return layer
