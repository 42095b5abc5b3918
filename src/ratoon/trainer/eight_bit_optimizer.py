"""AdamW whose moments are held in 8 bits, by bitsandbytes: a quarter of their memory and a little over."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ratoon.distributed.sharded import is_cut
from ratoon.planner.memory_sizes import eight_bit_bytes
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.types.errors import UserError
from ratoon.types.extras import install_command

LEAST_WEIGHTS = 4096
"""Tensors of fewer weights keep float32 moments: norms, biases and small adapters, which the library lets be."""

_CODE_TABLES = ("qmap1", "qmap2")
"""In the library's state of a tensor, what its codes mean: constants, which checkpoints leave out."""


def check_bitsandbytes() -> None:
    """Raises UserError where the library of 8-bit moments is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            f'trainer.optimizer_states = "8bit" needs the bitsandbytes package: {install_command("8bit")}; '
            'or set it to "float32"'
        )


class EightBitOptimizer(MasterOptimizer):
    """A `MasterOptimizer` that rounds each moment to 8 bits after an update has used it.

    Blocks of 256 weights have a float32 scale each, their largest magnitude, and codes that are finer near 0
    (block-wise dynamic quantisation, arXiv:2110.02861). Beside exact AdamW from the same moments, an update differs by
    float32 rounding alone; a stored first moment by at most 0.0071 of its block's largest, a second by 0.0036. Masters
    and summed gradients are float32 as ever. Its checkpoints and those of other optimizers are not for one another.
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
        """Raises UserError where bitsandbytes is missing or cannot update here, and for a model cut over ranks."""
        check_bitsandbytes()
        parameters = list(parameters)
        if clip is not None or any(map(is_cut, parameters)):
            raise UserError(
                'trainer.optimizer_states = "8bit" needs whole weights, and these are cut over the ranks; '
                'set trainer.sharding = "none", or trainer.optimizer_states = "float32"'
            )
        super().__init__(parameters, learning_rate=learning_rate, weight_decay=weight_decay, betas=betas)
        for master in self.masters:
            if master.dtype != torch.float32:
                raise UserError(
                    f'trainer.optimizer_states = "8bit" updates float32 weights, and these are {master.dtype}; '
                    'set it to "float32"'
                )
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]} for group in self.adamw.param_groups
        ]
        adamw_8bit = import_module("bitsandbytes").optim.AdamW8bit
        for device in {master.device for master in self.masters}:
            _try_update(adamw_8bit, device)
        self.adamw = adamw_8bit(groups, lr=learning_rate, betas=betas)

    @property
    def full_state_bytes(self) -> int:
        moments = sum(
            2 * (eight_bit_bytes(num_weights) if num_weights >= LEAST_WEIGHTS else 4 * num_weights)
            for num_weights in (master.numel() for master in self.masters)
        )
        copies = sum(
            4 * master.numel()
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if parameter is not master
        )
        return moments + copies

    def state_dict(self) -> dict[str, Any]:
        """Codes, scales and step counts, and the masters of 16-bit weights."""
        state = super().state_dict()
        moments = {
            index: {key: value for key, value in self.adamw.state[master].items() if key not in _CODE_TABLES}
            for index, master in enumerate(self._in_order())
            if master in self.adamw.state
        }
        return state | {"adamw": {"state": moments, "param_groups": state["adamw"]["param_groups"]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What this class's `state_dict` gave. Raises UserError for moments of another kind."""
        saved = state["adamw"]["state"]
        if any("state1" not in found for found in saved.values()):
            raise UserError(
                'the checkpoint holds moments of 32 bits, and trainer.optimizer_states is "8bit"; '
                "resume with the setting that the run began with"
            )
        moments = {
            index: found | self._code_tables(master) if found["state1"].dtype == torch.uint8 else found
            for index, master in enumerate(self._in_order())
            if (found := saved.get(index)) is not None
        }
        self.adamw.load_state_dict({"state": moments, "param_groups": state["adamw"]["param_groups"]})
        with torch.no_grad():
            for master, copied in zip(self.masters, state["masters"], strict=True):
                if copied is not None:
                    master.copy_(copied)

    def _in_order(self) -> list[Tensor]:
        """The masters as the optimizer numbers them."""
        return [master for group in self.adamw.param_groups for master in group["params"]]

    def _code_tables(self, master: Tensor) -> dict[str, Tensor]:
        tables: dict[str, Tensor] = self.adamw.name2qmap
        return {"qmap1": tables["dynamic"].to(master.device), "qmap2": tables["udynamic"].to(master.device)}


def _try_update(adamw_8bit: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """Now, and not after the first rollout: the library has binaries for some versions of CUDA only."""
    weight = nn.Parameter(torch.zeros(LEAST_WEIGHTS, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        adamw_8bit([weight]).step()
    except (RuntimeError, AttributeError) as error:
        raise UserError(
            f'bitsandbytes cannot update on {device} here ({error}); set trainer.optimizer_states = "float32"'
        ) from error
