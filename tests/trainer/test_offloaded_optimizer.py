"""Updates on the host against AdamW where the model is, and checkpoints that either reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ratoon.trainer.offloaded_optimizer import OffloadedOptimizer
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.types import UserError

Settings = dict[str, Any]
SETTINGS: Settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def make_model(dtype: torch.dtype, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(device=device, dtype=dtype)


def train(model: nn.Sequential, optimizer: MasterOptimizer, steps: range) -> list[float]:
    """Two microbatches an update; the second layer's bias has no gradient in even steps."""
    norms: list[float] = []
    for step in steps:
        torch.manual_seed(step)
        model[1].bias.requires_grad_(step % 2 == 1)
        for _ in range(2):
            parameter = next(model.parameters())
            inputs = torch.randn(4, 7).to(parameter)
            model(inputs).square().sum().backward()
            optimizer.accumulate()
        norms.append(optimizer.step(learning_rate=1e-2 / (step + 1), max_grad_norm=0.5))
    return norms


def both(dtype: torch.dtype, device: str = "cpu") -> tuple[tuple[nn.Sequential, MasterOptimizer], ...]:
    first, second = make_model(dtype, device), make_model(dtype, device)
    return (
        (first, MasterOptimizer(first.parameters(), **SETTINGS)),
        (second, OffloadedOptimizer(second.parameters(), **SETTINGS)),
    )


def assert_same(first: nn.Module, second: nn.Module, rtol: float) -> None:
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates_are_adamws(dtype: torch.dtype):
    (first, plain), (second, offloaded) = both(dtype)
    expected, found = train(first, plain, range(5)), train(second, offloaded, range(5))
    assert found == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 0.5, "the norm is clipped"
    # In bfloat16 a master's last digit may round the other way.
    assert_same(first, second, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    for left, right in zip(plain.masters, offloaded.masters, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(MasterOptimizer, OffloadedOptimizer), (OffloadedOptimizer, MasterOptimizer)])
def test_either_goes_on_from_the_others_checkpoint(
    dtype: torch.dtype, kinds: tuple[Callable[..., MasterOptimizer], ...]
):
    whole, parts = make_model(dtype), make_model(dtype)
    train(whole, MasterOptimizer(whole.parameters(), **SETTINGS), range(6))
    first = kinds[0](parts.parameters(), **SETTINGS)
    train(parts, first, range(3))
    resumed = make_model(dtype)
    resumed.load_state_dict(parts.state_dict())
    second = kinds[1](resumed.parameters(), **SETTINGS)
    second.load_state_dict(first.state_dict())
    train(resumed, second, range(3, 6))
    assert_same(whole, resumed, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_weights():
    model = make_model(torch.bfloat16)
    optimizer = OffloadedOptimizer(model.parameters(), **SETTINGS)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.full((2, 7), torch.inf, dtype=torch.bfloat16)).sum().backward()
    optimizer.accumulate()
    with pytest.raises(FloatingPointError, match="norm is"):
        optimizer.step(learning_rate=1.0, max_grad_norm=1.0)
    for left, right in zip(before, model.parameters(), strict=True):
        assert torch.equal(left, right)
    train(model, optimizer, range(1))  # nothing of it is left
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_several_processes_are_refused():
    """Their gradients would not be summed."""
    with pytest.raises(UserError, match="works with one process"):
        OffloadedOptimizer(make_model(torch.float32).parameters(), **SETTINGS, clip=lambda _: 1.0)


@pytest.mark.gpu
def test_a_gpu_holds_neither_masters_nor_moments():
    (first, plain), (second, offloaded) = both(torch.bfloat16, "cuda")
    train(first, plain, range(4))
    train(second, offloaded, range(4))
    assert_same(first, second, rtol=1e-2)
    assert all(master.is_pinned() for master in offloaded.masters)
    moments = [value for state in offloaded.adamw.state.values() for value in state.values()]
    assert not any(value.is_cuda for value in moments)
