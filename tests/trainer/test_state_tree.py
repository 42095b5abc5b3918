"""Nested state through JSON and safetensors: the same bits, the same types."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ratoon.trainer.state_tree import capture_rng, join_state, restore_rng, split_state, state_bytes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def through_disk(state: Any, folder: Path) -> Any:
    skeleton, tensors = split_state(state)
    save_file(tensors, folder / "tensors.safetensors")
    return join_state(json.loads(json.dumps(skeleton, allow_nan=False)), load_file(folder / "tensors.safetensors"))


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for mine, theirs in zip(left, right, strict=True):
            assert_same(mine, theirs)
    else:
        assert repr(left) == repr(right)


tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), tensors)
keys = st.one_of(st.integers(), st.text(max_size=5), st.sampled_from(["$tensor", "$tuple", "$pairs", "$float"]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(state=trees)
@settings(max_examples=150, deadline=None)
def test_any_state_survives(state: Any):
    skeleton, tensors = split_state(state)
    assert_same(join_state(json.loads(json.dumps(skeleton, allow_nan=False)), tensors), state)


def test_bits_that_are_no_numbers_survive_the_file(tmp_path: Path):
    odd_nan = torch.tensor([0x7FC00123, -0x80000000, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert_same(through_disk({"x": odd_nan}, tmp_path), {"x": odd_nan})


def test_views_of_one_tensor_are_stored_apart(tmp_path: Path):
    base = torch.arange(12.0).view(3, 4)
    state = {"all": base, "row": base[1], "transposed": base.t(), "again": base}
    assert_same(through_disk(state, tmp_path), {name: tensor.contiguous() for name, tensor in state.items()})


def test_what_is_split_off_does_not_change_with_the_original():
    moment = torch.zeros(3)
    _, tensors = split_state({"moment": moment})
    moment += 1
    (copy,) = tensors.values()
    assert copy.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "where"),
    [({"a": [1, object()]}, r"state\.a\.1"), ({"a": {(1, 2): 3}}, r"state\.a has keys"), (nn.Linear(1, 1), "state is")],
)
def test_anything_else_is_refused_by_place(state: Any, where: str):
    with pytest.raises(ValueError, match=where):
        split_state(state)


def test_keys_that_look_alike_do_not_collide():
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    skeleton, tensors = split_state(state)
    assert_same(join_state(json.loads(json.dumps(skeleton)), tensors), state)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(torch.randn(4, 5)) * torch.randn(4, 3)).square().sum().backward()
        optimizer.step()


def test_training_goes_on_bit_by_bit(tmp_path: Path):
    """tinker#446: resuming means optimizer and generators, not weights alone."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    train(model, optimizer, 3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = {"optimizer": optimizer.state_dict(), "rng": capture_rng()}
    loaded = through_disk(saved, tmp_path)
    assert_same(loaded, saved)
    train(model, optimizer, 3)

    torch.manual_seed(99)
    resumed = nn.Linear(5, 3)
    resumed.load_state_dict(weights)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.5)
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    restore_rng(loaded["rng"])
    train(resumed, resumed_optimizer, 3)
    assert_same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert_same(resumed_optimizer.state_dict(), optimizer.state_dict())


def test_bytes_of_all_tensors():
    state = {"a": [torch.zeros(3, 5), (torch.zeros(7, dtype=torch.bfloat16),)], "b": 3, "c": {1: torch.zeros(())}}
    assert state_bytes(state) == 60 + 14 + 4
