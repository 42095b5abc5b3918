"""AdamW over 32-bit (or wider) weights, whatever the model computes in, and its learning-rate schedule."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ratoon.distributed.sharded import cut_like, is_cut
from ratoon.trainer.config import TrainerConfig

Schedule = Literal["constant", "linear", "cosine"]


class MasterOptimizer:
    """AdamW whose weights and gradients are kept in float32 for 16-bit models.

    A 16-bit weight of 1.0 cannot move by less than 2**-8 (bfloat16), so small learning rates would
    act on nothing. Gradients of microbatches are summed in float32 for the same reason. Parameters
    of 32 and 64 bits are their own masters: nothing is copied. Those of a sharded model are, and each rank updates
    its parts.
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
        """clip: scales the parameters' gradients to a 2-norm at most and returns the one before (`clip_gradients`), for
        a sharded model, whose norm no rank can tell alone."""
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [_master_of(parameter) for parameter in self.parameters]
        matrices = [master for master in self.masters if master.ndim >= 2]
        vectors = [master for master in self.masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        assert clip is not None or not any(map(is_cut, self.parameters)), "no rank knows the norm of cut gradients"
        self.clip = self._clip if clip is None else clip
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=betas,
            fused=has_fused_update(self.masters) or None,
        )

    def accumulate(self) -> None:
        """Adds the model's gradients to the masters' and clears them; call after each backward."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is master or parameter.grad is None:
                continue
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """One update from the accumulated gradients, which are cleared. Returns their 2-norm before clipping.

        An update whose norm is not finite is refused: the weights stay and FloatingPointError is raised.
        """
        norm = self.clip(max_grad_norm)
        if not math.isfinite(norm):
            self.clear()
            raise FloatingPointError(
                f"the gradient's norm is {norm}; the weights were left as they are. What does it is a large "
                "trainer.learning_rate, algorithm.kl_coefficient or algorithm.entropy_coefficient, or a 16-bit "
                "model.dtype, in which a model may overflow. These do not change within a run: set them in a new one "
                "(--run.name=NAME), or start anew with --fresh (the old run is set aside)"
            )
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.clear()
        self.take_masters()
        return norm

    def clear(self) -> None:
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def _clip(self, max_norm: float) -> float:
        return nn.utils.clip_grad_norm_(self.masters, max_norm).item()

    @property
    def master_of(self) -> dict[nn.Parameter, Tensor]:
        """By the model's parameter, the tensor that is trained in its place; it itself where it is its own master."""
        return dict(zip(self.parameters, self.masters, strict=True))

    def take_masters(self) -> None:
        """Gives the model's parameters the masters' values, rounded."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)

    @property
    def full_state_bytes(self) -> int:
        """What `state_dict` holds from the first update on: two moments of each weight, and the masters it copies."""
        moments = sum(2 * master.numel() * master.element_size() for master in self.masters)
        copies = sum(
            master.numel() * master.element_size()
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if parameter is not master
        )
        return moments + copies

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts, and the masters of 16-bit weights."""
        masters = [
            None if parameter is master else master
            for parameter, master in zip(self.parameters, self.masters, strict=True)
        ]
        return {"adamw": self.adamw.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave with one process or with a model that was not sharded, whatever this one is."""
        in_order = [parameter for group in self.adamw.param_groups for parameter in group["params"]]
        moments = {
            index: {key: _moment_like(value, in_order[index]) for key, value in found.items()}
            for index, found in state["adamw"]["state"].items()
        }
        self.adamw.load_state_dict({"state": moments, "param_groups": self._groups_as_here(state["adamw"])})
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                if saved is not None:
                    master.copy_(cut_like(saved, master))

    def _groups_as_here(self, adamw: dict[str, Any]) -> list[dict[str, Any]]:
        """The saved groups' settings, with the implementation that suits these parameters."""
        return [
            saved | {name: own[name] for name in ("foreach", "fused")}
            for saved, own in zip(adamw["param_groups"], self.adamw.param_groups, strict=True)
        ]


def has_fused_update(masters: Iterable[Tensor]) -> bool:
    """Whether one kernel reads and writes weight, gradient and moments. Torch's own choice on a GPU passes over them
    several times and needs another 4 bytes a weight; for tensors that are cut it is a loop over them."""
    return any(master.is_cuda for master in masters)


def _moment_like(value: Any, parameter: Tensor) -> Any:
    is_like_weight = isinstance(value, Tensor) and value.shape == parameter.shape and is_cut(parameter)
    return cut_like(value, parameter) if is_like_weight else value


def _master_of(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype.itemsize >= 4:
        return parameter
    return parameter.detach().float().clone().requires_grad_(True)


def learning_rate_at(step: int, config: TrainerConfig) -> float:
    """The rate of the update made in `step` (from 0)."""
    return scheduled_rate(
        step,
        peak=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        num_steps=config.num_steps,
    )


def scheduled_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, num_steps: int, final_fraction: float = 0.0
) -> float:
    """Linear warm-up to `peak`, then constant, or falling to `final_fraction * peak` at `num_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or num_steps <= warmup_steps:
        return peak
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    fall = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return peak * (1 - (1 - final_fraction) * fall)
