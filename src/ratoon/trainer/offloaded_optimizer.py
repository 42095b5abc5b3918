"""AdamW whose weights and moments stay in host memory: a GPU holds the model and its gradients only."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.types.errors import UserError


class OffloadedOptimizer(MasterOptimizer):
    """A `MasterOptimizer` of one process that updates on the host.

    Gradients are summed where the model is, in the masters' dtype; a step clips them there, sends them to the host
    once, updates there and sends the weights back. Where the model is on a GPU, host memory is page-locked: 16 bytes a
    weight with its moments and gradient. Checkpoints are those of `MasterOptimizer`, and each reads the other's.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
        clip: Callable[[float], float] | None = None,
    ) -> None:
        """Raises UserError where several processes train together."""
        if clip is not None or (dist.is_initialized() and dist.get_world_size() > 1):
            raise UserError(
                "trainer.offload_optimizer works with one process, and several train together here; set it to false: "
                'with trainer.sharding = "full" each holds a part of weights and moments'
            )
        super().__init__(parameters, learning_rate=learning_rate, weight_decay=weight_decay, betas=betas)
        on_host = {id(master): _on_host(master).requires_grad_(True) for master in self.masters}
        groups = [
            {"params": [on_host[id(master)] for master in group["params"]], "weight_decay": group["weight_decay"]}
            for group in self.adamw.param_groups
        ]
        self.masters = [on_host[id(master)] for master in self.masters]
        self.adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
        self.clip = self._clip_and_send
        self._sums: list[Tensor | None] = [None] * len(self.masters)
        self._received = [
            torch.empty_like(master, requires_grad=False, pin_memory=parameter.is_cuda)
            for parameter, master in zip(self.parameters, self.masters, strict=True)
        ]

    def accumulate(self) -> None:
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if parameter.grad is None:
                continue
            gradient, summed = parameter.grad.to(master.dtype), self._sums[index]
            self._sums[index] = gradient if summed is None else summed.add_(gradient)
            parameter.grad = None

    def clear(self) -> None:
        super().clear()
        self._sums = [None] * len(self.masters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A master that is not in it is the parameter itself, which has the checkpoint's weights."""
        super().load_state_dict(state)
        with torch.no_grad():
            for parameter, master, saved in zip(self.parameters, self.masters, state["masters"], strict=True):
                if saved is None:
                    master.copy_(parameter)

    @torch.no_grad()
    def _clip_and_send(self, max_norm: float) -> float:
        """The masters' gradients from the sums, whose norm before is returned. Waits for the device."""
        found = [summed for summed in self._sums if summed is not None]
        norm = nn.utils.get_total_norm(found)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for master, summed, received in zip(self.masters, self._sums, self._received, strict=True):
            if summed is not None:
                received.copy_(summed.mul_(scale.to(summed.dtype)), non_blocking=True)
                master.grad = received
        return norm.item()  # after the copies, which are in order before it


def _on_host(master: Tensor) -> Tensor:
    """A copy, page-locked where the original is on a GPU."""
    copied = torch.empty_like(master, device="cpu", requires_grad=False, pin_memory=master.is_cuda)
    return copied.copy_(master.detach())
