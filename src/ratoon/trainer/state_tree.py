"""Nested state (of an optimizer, of random generators) as named tensors and plain JSON: no pickle is ever read."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# How a node that JSON lacks is written: an object with this one key.
_TENSOR, _TUPLE, _PAIRS, _FLOAT = "$tensor", "$tuple", "$pairs", "$float"
_MARKS = (_TENSOR, _TUPLE, _PAIRS, _FLOAT)


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Takes the tensors out of nested dicts, lists and tuples.

    Leaves may be tensors, strings, bools, ints, floats (NaN and infinities too) and None; dict keys strings or ints.
    Returns what is left, as JSON, and the tensors by name: on the CPU, contiguous, sharing no memory with one another.
    Raises ValueError naming the place of anything else.
    """
    tensors: dict[str, Tensor] = {}
    return _take_apart(state, "state", tensors), tensors


def join_state(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `split_state`, with tuples, int keys, dtypes and bits as they were."""
    if isinstance(skeleton, list):
        return [join_state(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        ((mark, content),) = skeleton.items()
        if mark == _TENSOR:
            return tensors[content]
        if mark == _TUPLE:
            return tuple(join_state(item, tensors) for item in content)
        if mark == _PAIRS:
            return {key: join_state(item, tensors) for key, item in content}
        if mark == _FLOAT:
            return float(content)
    return {key: join_state(item, tensors) for key, item in skeleton.items()}


def _take_apart(node: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        name = f"{len(tensors)}:{where}"  # numbered: the places {"a.b": ...} and {"a": {"b": ...}} read alike
        # A copy: safetensors refuses tensors that share memory, and training goes on.
        tensors[name] = node.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: name}
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else {_FLOAT: str(node)}
    if isinstance(node, tuple | list):
        items = [_take_apart(item, f"{where}.{index}", tensors) for index, item in enumerate(node)]
        return {_TUPLE: items} if isinstance(node, tuple) else items
    if isinstance(node, Mapping):
        if not all(isinstance(key, str | int) and not isinstance(key, bool) for key in node):
            raise ValueError(f"{where} has keys that are neither strings nor ints: {list(node)[:5]}")
        items = [(key, _take_apart(item, f"{where}.{key}", tensors)) for key, item in node.items()]
        is_plain = all(isinstance(key, str) and key not in _MARKS for key in node)
        return dict(items) if is_plain else {_PAIRS: items}
    raise ValueError(
        f"{where} is a {type(node).__name__}, which a checkpoint cannot hold; "
        "give tensors, numbers, strings, None, or dicts, lists and tuples of these"
    )


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(item) for item in state.values())
    if isinstance(state, tuple | list):
        return sum(state_bytes(item) for item in state)
    return 0


def capture_rng() -> dict[str, Any]:
    """State of torch's global generators: the CPU's and each CUDA device's."""
    cuda = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Sets torch's global generators to what `capture_rng` saw.

    On a host with fewer or more GPUs, those that both have are set.
    """
    torch.set_rng_state(state["cpu"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)
