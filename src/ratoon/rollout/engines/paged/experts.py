"""Experts in a decoder's layers: where they are, which of them the router chose, and whether a graph can hold them."""

# Shape letters: R rows of a pass, L layers of the model, K experts per token.

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.models import model_shape
from ratoon.models.layers import marked_layers
from ratoon.rollout.model_checks import check_has_experts
from ratoon.types import UserError

_GROUPED_MAJORS = (9, 10)
"""Compute capabilities on which torch 2.10 to 2.13 multiplies groups of bfloat16 in one kernel (`use_fast_path` of its
GroupedBlas.cpp). Elsewhere, and for other dtypes, it reads the groups' sizes on the host, which a recording refuses."""


def experts_of_layers(model: PreTrainedModel) -> list[nn.Module | None]:
    """[L] the module of each layer's experts, in the order in which layers run; None for a layer without any.

    Raises UserError for a dense model, and for experts that are not called as `experts(rows, ids, weights)`.
    """
    check_has_experts(model_shape(model.config))
    found = [_experts_in(layer) for layer in marked_layers(model)]
    if not any(found) or any(len(modules) > 1 for modules in found):
        raise UserError(
            f"rollout.return_routed_experts: {type(model).__name__} has {max(map(len, found), default=0)} modules in a "
            "layer that transformers calls as its experts, and one is needed; leave it out with this model"
        )
    return [modules[0] if modules else None for modules in found]


def why_not_recorded(model: PreTrainedModel) -> str | None:
    """Why no CUDA graph can hold a pass of the model; None where one can.

    transformers has a way that any graph can hold ("batched_mm"), but it copies the weights of every chosen expert for
    every row: gigabytes a layer for a batch of hundreds.
    """
    if not model_shape(model.config).num_experts:
        return None
    experts = _experts_in(model)
    if not experts:
        return f"{type(model).__name__} runs its experts in a way of its own"
    # Each looks into its config itself, at every call.
    kind = experts[0].config._experts_implementation  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    if kind == "batched_mm":
        return None
    if kind != "grouped_mm":
        return f"experts_implementation {kind!r} asks the host which experts were chosen"
    dtypes = {weight.dtype for module in experts for weight in module.parameters() if weight.ndim == 3}
    if dtypes != {torch.bfloat16}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"its experts are {names}, and torch multiplies groups without the host in bfloat16 only"
    major, minor = torch.cuda.get_device_capability(model.device)
    if major not in _GROUPED_MAJORS:
        return (
            f"torch multiplies groups without the host on GPUs of capability 9 and 10, and this one is {major}.{minor}"
        )
    return None


class RouteRecorder:
    """The experts chosen in each forward pass of one model, whose passes come one after another."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Watches the model from now on. Raises UserError as `experts_of_layers` does."""
        self._experts = experts_of_layers(model)
        self._chosen = self._nothing()
        self.shape_per_token = len(self._experts), model_shape(model.config).experts_per_token
        """L, K."""

        if not self.shape_per_token[1]:
            raise UserError(
                f"rollout.return_routed_experts: the configuration of {type(model).__name__} does not say how many "
                "experts a token has (num_experts_per_tok); leave it out with this model"
            )
        for layer, experts in enumerate(self._experts):
            if experts is not None:
                experts.register_forward_pre_hook(self._hook(layer), with_kwargs=True)

    def take(self) -> Tensor:
        """[R, L, K] int16 of the pass that has just run, -1 in layers without experts. Graphs can hold it."""
        chosen, self._chosen = self._chosen, self._nothing()
        pairs = list(zip(self._experts, chosen, strict=True))
        silent = [layer for layer, (experts, ids_RK) in enumerate(pairs) if (experts is None) != (ids_RK is None)]
        assert not silent, f"the experts of layers {silent} were not called in this pass"
        some_RK = next(ids_RK for ids_RK in chosen if ids_RK is not None)
        none_RK = torch.full_like(some_RK, -1)
        routes_RLK = torch.stack([none_RK if ids_RK is None else ids_RK for ids_RK in chosen], dim=1)
        assert routes_RLK.shape[1:] == self.shape_per_token, (
            f"routers chose {tuple(routes_RLK.shape[1:])} experts a token, and {self.shape_per_token} were expected"
        )
        return routes_RLK.to(torch.int16)

    def _nothing(self) -> list[Tensor | None]:
        return [None] * len(self._experts)

    def _hook(self, layer: int) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Kept, not copied: nothing writes into what a router chose, and one copy at the end serves all layers.
            self._chosen[layer] = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]

        return note


def _experts_in(module: nn.Module) -> list[nn.Module]:
    return [found for found in module.modules() if _is_experts(found)]


def _is_experts(module: nn.Module) -> bool:
    # What transformers' use_experts_implementation gives each instance; wrappers only pass attributes on.
    return {"has_gate", "has_bias", "is_transposed"} <= vars(module).keys()
