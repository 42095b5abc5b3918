"""How much of a step a GPU had nothing to do."""

from typing import Any

import pytest
import torch
from torch import nn

from ratoon.bench.policy_update import timing
from ratoon.bench.policy_update.timing import idle_fraction, optimizer_seconds


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0.0),
        ([(3.0, 5.0)], 0.0),
        ([(0, 1), (3, 4)], 0.5),
        ([(3, 4), (0, 1)], 0.5),
        ([(0, 8), (1, 2), (9, 10)], 0.1),
        ([(0, 2), (1, 4), (4, 5)], 0.0),
    ],
)
def test_idle_fraction(spans: list[tuple[float, float]], idle: float):
    assert idle_fraction(spans) == pytest.approx(idle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timing_the_optimizer_leaves_the_weights(dtype: torch.dtype):
    """Variants that are measured later must not start from others."""
    model = nn.Linear(33, 17).to(dtype)
    frozen = model.bias.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.weight.grad = torch.randn_like(model.weight)
    seconds = optimizer_seconds(model, torch.device("cpu"))
    assert seconds is not None and 0 < seconds < 10
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert model.weight.grad is None and frozen.grad is None


@pytest.mark.parametrize("fails_in", ["__init__", "accumulate", "step"])
def test_an_optimizer_that_does_not_fit_has_no_time(fails_in: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried 99 GiB")

    monkeypatch.setattr(timing.MasterOptimizer, fails_in, fail)
    model = nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    assert optimizer_seconds(model, torch.device("cpu")) is None
