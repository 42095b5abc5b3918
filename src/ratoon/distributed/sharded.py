"""A model cut over ranks: each holds a part of every weight, gradient and moment, and gathers a layer where it runs."""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ratoon.layout import PackedLayout, pack_documents

Result = TypeVar("Result")

_RUN = "_ratoon_run"
_IS_RUNNING = "_ratoon_is_running"


def shard_mesh(device_type: str) -> DeviceMesh:
    """One axis over all ranks of the default process group."""
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    layers: Sequence[nn.Module],
    compute_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
) -> nn.Module:
    """Cuts every parameter over `mesh`, in place, and returns the model. All ranks must hold the same weights.

    mesh: one axis; what it spans is summed over. Weights move to its device a layer at a time.
    layers: in the order in which they run. Each is gathered by itself; what is outside of them (embedding, last norm,
    head) as one more unit, the root, which stays gathered from its forward to its backward pass.
    compute_dtype: of gathered weights and activations. Trained weights are kept in float32 (float64 if they come so),
    frozen ones as they come. Gradients are summed in the kept dtype.
    reshard_after_forward: drop a layer's gathered weights after its forward pass and gather them again for backward;
    otherwise each rank holds the model in `compute_dtype` in between.
    prefetch: how many layers ahead are being gathered while one computes.

    Afterwards `run_in_root` is the only way to use the weights outside of `model.forward`. Gradients are sums over
    ranks, never means. Every rank must run the same number of forward and backward passes (see `idle_layout`).
    Recomputation and compilation of layers are set before; deep copies are impossible after.

    Raises ValueError where the model is sharded already, or a layer is not in it.
    """
    _check(model, mesh, layers)
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    for unit in (*layers, model):
        _to_masters(unit)
        master_dtype = next((p.dtype for p in unit.parameters() if p.requires_grad), torch.float32)
        fully_shard(
            unit,
            mesh=mesh,
            # The root's weights are needed again as soon as backward begins.
            reshard_after_forward=reshard_after_forward and unit is not model,
            # Inputs are not cast: they are integers, or come from another unit; and a cast takes frozen dataclasses
            # among them apart.
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=master_dtype, cast_forward_inputs=False
            ),
        )
        assert isinstance(unit, FSDPModule), "fully_shard changes the class of what it shards"
        # Both reach this unit only. Without them the sum would be divided by the number of ranks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _set_prefetch(model, layers, prefetch)
    for module in _outside(model, layers):
        module.register_forward_pre_hook(_refuse_sharded)
    setattr(model, _RUN, MethodType(_run, model))
    register_fsdp_forward_method(model, _RUN)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` has been called on the model."""
    return isinstance(model, FSDPModule)


def run_in_root(model: nn.Module, function: Callable[[], Result]) -> Result:
    """Calls `function` as if it were the model's forward pass, with the root's weights gathered; returns its result.

    For passes that call a part of the model, or read a weight (the head's), directly. The result is a tensor or a tuple
    of tensors; gradients of what depends on them reach the parts of the weights in backward. All ranks must call it
    together. Without gradients, everything is cut again on the way out. A model that is not sharded, or is inside
    already, just calls `function`.
    """
    if not is_sharded(model) or vars(model).get(_IS_RUNNING):
        return function()
    vars(model)[_IS_RUNNING] = True
    try:
        result = getattr(model, _RUN)(function)
    finally:
        vars(model)[_IS_RUNNING] = False
    if not torch.is_grad_enabled():
        # No backward pass will do it, and gathered weights would outlive an update of their parts.
        reshard(model)
    return result


def reshard(model: nn.Module) -> None:
    """Drops all gathered weights, so that the next pass gathers them anew. No communication."""
    for unit in _units(model):
        unit.reshard()


def idle_layout() -> PackedLayout:
    """A layout with one scored token: what a rank with nothing to do runs, so that the others do not wait for it.

    Multiply what comes of it by 0: its gradients are then exact zeros.
    """
    return pack_documents([[0, 0]])


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scales the summed gradients so that their 2-norm, over all ranks' parts, is at most `max_norm`.

    Returns the norm before, the same on every rank; where it is not finite nothing is scaled. Gathered weights are
    dropped: an update is next.
    """
    reshard(model)
    grads = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    device = local_part(next(model.parameters())).device
    square = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        square += nn.utils.get_total_norm(grads).double().square()
    if is_sharded(model):
        dist.all_reduce(square, group=_mesh(model).get_group())
    norm = square.sqrt()
    if not norm.isfinite():
        return norm.item()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm.item()


@torch.no_grad()
def full_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's name and whole value, one at a time; tied weights once. All ranks must iterate to the end.

    The value of a weight that is not cut shares the weight's memory.

    dtype: cast to it before it is sent; None leaves the kept dtype.
    """
    reshard(model)
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if dtype is not None:
            value = value.to(dtype)
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut over ranks, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cut(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    return isinstance(tensor, DTensor)


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, of which every rank has a copy, cut over ranks and on the device as `like` is. No communication."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _run(_: nn.Module, function: Callable[[], Result]) -> Result:
    return function()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _mesh(model: nn.Module) -> DeviceMesh:
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor), "reshard leaves the parts registered"
    return parameter.device_mesh


def _check(model: nn.Module, mesh: DeviceMesh, layers: Sequence[nn.Module]) -> None:
    if _units(model):
        raise ValueError(f"this {type(model).__name__} is sharded already; load it anew to shard it otherwise")
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh must have one axis, got {mesh.ndim}; flatten the axes that gradients are summed over"
        )
    known = set(model.modules()) - {model}
    strangers = [type(layer).__name__ for layer in layers if layer not in known]
    if not layers or strangers:
        raise ValueError(
            f"layers must be modules of the {type(model).__name__}, got {strangers or 'none'}; "
            "give its decoder layers in the order in which they run"
        )


@torch.no_grad()
def _to_masters(unit: nn.Module) -> None:
    """A 16-bit weight of 1.0 cannot move by less than 2**-8 (bfloat16): updates would act on nothing."""
    for parameter in unit.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _set_prefetch(model: nn.Module, layers: Sequence[nn.Module], prefetch: int) -> None:
    if prefetch == 0:
        return  # torch's own: one ahead, asked for later
    units: list[Any] = [model, *layers]
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + prefetch])
        # The root stays gathered, and comes first in backward as it does in forward.
        before = layers[max(place - 1 - prefetch, 0) : max(place - 1, 0)] if place else layers[-prefetch:]
        unit.set_modules_to_backward_prefetch(list(reversed(before)))


def _outside(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with weights of their own that the root gathers."""
    inside = {module for layer in layers for module in layer.modules()}
    return [m for m in model.modules() if m not in inside and next(m.parameters(recurse=False), None) is not None]


def _refuse_sharded(module: nn.Module, _: Any) -> None:
    if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        raise ValueError(
            f"a part of a sharded model ({type(module).__name__}) was called while its weights are not gathered; "
            "call the model itself, or wrap the call: ratoon.distributed.run_in_root(model, lambda: ...)"
        )
