"""Updates with 8-bit moments against AdamW in float64, and what is held and saved of them."""

# Shape letters: W weights of one tensor.

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratoon.planner.memory_sizes import eight_bit_bytes
from ratoon.trainer.checkpoint import load_checkpoint, save_checkpoint
from ratoon.trainer.eight_bit_optimizer import EightBitOptimizer
from ratoon.trainer.optimizer import MasterOptimizer
from ratoon.trainer.state_tree import state_bytes
from ratoon.types import UserError

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes (41 MiB, extra `8bit`), which CI does without")

BETAS = (0.9, 0.95)
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": BETAS}
FIRST_GAP, SECOND_GAP = 0.9 / 64 / 2, 0.9 / 128 / 2
"""How far rounding moves a first and a second moment at most, over its block's largest: half of the code tables' widest
gap, which lies between 0.1 and 1 where they have 64 and 128 values."""

BLOCK = 256


def make_model(dtype: torch.dtype) -> nn.Sequential:
    """Tensors of 8-bit moments (91 x 67 is no multiple of a block) and of float32 ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 91), nn.Tanh(), nn.Linear(91, 5)).to(dtype=dtype)


def train(model: nn.Sequential, optimizer: MasterOptimizer, steps: range) -> list[float]:
    """Imitates a fixed network, two microbatches an update; losses before each."""
    torch.manual_seed(1)
    target = nn.Sequential(nn.Linear(67, 91), nn.Tanh(), nn.Linear(91, 5)).double()
    dtype = next(model.parameters()).dtype
    losses: list[float] = []
    for step in steps:
        torch.manual_seed(100 + step)
        total = 0.0
        for _ in range(2):
            inputs = torch.randn(16, 67).to(dtype).double()
            loss = (model(inputs.to(dtype)).double() - target(inputs).detach()).square().mean()
            loss.backward()
            optimizer.accumulate()
            total += loss.item()
        optimizer.step(learning_rate=1e-2, max_grad_norm=10.0)
        losses.append(total / 2)
    return losses


def block_largest(moment_W: Tensor) -> Tensor:
    """[W], each weight's block's largest magnitude."""
    blocks = nn.functional.pad(moment_W, (0, -len(moment_W) % BLOCK)).view(-1, BLOCK)
    return blocks.abs().amax(1).repeat_interleave(BLOCK)[: len(moment_W)]


def stored(optimizer: EightBitOptimizer, master: Tensor, which: int) -> Tensor:
    """A moment in float64, from its codes and scales."""
    state = optimizer.adamw.state[master]
    codes_W = state[f"state{which}"].flatten()
    if codes_W.dtype == torch.float32:
        return codes_W.double()
    scales_W = state[f"absmax{which}"].double().repeat_interleave(BLOCK)[: len(codes_W)]
    return state[f"qmap{which}"].double()[codes_W.long()] * scales_W


def give_gradients(optimizer: MasterOptimizer, seed: int) -> list[Tensor]:
    """Of mixed signs, magnitudes from 0.5 to 1; in float64, as they were given."""
    generator = torch.Generator().manual_seed(seed)
    given: list[Tensor] = []
    for master in optimizer.masters:
        magnitude = 0.5 + 0.5 * torch.rand(master.shape, generator=generator)
        master.grad = magnitude * torch.where(torch.rand(master.shape, generator=generator) < 0.3, -1.0, 1.0)
        given.append(master.grad.double().flatten())
    return given


def test_an_update_is_adamws_and_only_its_moments_are_rounded():
    """From the stored moments, each update's weights are exact AdamW's, and so are the new moments before rounding."""
    optimizer = EightBitOptimizer(make_model(torch.float32).parameters(), **SETTINGS)
    has_rounded = False
    for step in range(1, 6):
        before = [master.detach().double().flatten() for master in optimizer.masters]
        held = [
            [stored(optimizer, master, which) if step > 1 else torch.zeros(master.numel()).double() for which in (1, 2)]
            for master in optimizer.masters
        ]
        gradients = give_gradients(optimizer, step)
        optimizer.step(learning_rate=1e-2, max_grad_norm=torch.inf)
        for master, weight_W, moments, gradient_W in zip(optimizer.masters, before, held, gradients, strict=True):
            first_W = BETAS[0] * moments[0] + (1 - BETAS[0]) * gradient_W
            second_W = BETAS[1] * moments[1] + (1 - BETAS[1]) * gradient_W.square()
            decay = 0.1 if master.ndim == 2 else 0.0
            root_W = second_W.sqrt() / sqrt(1 - BETAS[1] ** step)
            expected_W = weight_W * (1 - 1e-2 * decay) - 1e-2 * first_W / (1 - BETAS[0] ** step) / (root_W + 1e-8)
            torch.testing.assert_close(master.detach().double().flatten(), expected_W, rtol=1e-5, atol=1e-6)
            for which, exact_W, gap in ((1, first_W, FIRST_GAP), (2, second_W, SECOND_GAP)):
                is_coded = master.numel() >= 4096
                error_W = (stored(optimizer, master, which) - exact_W).abs()
                assert (error_W <= block_largest(exact_W) * (1.02 * gap if is_coded else 1e-6)).all()
                has_rounded |= bool(error_W.max() > 1e-4)
    assert has_rounded, "no moment was rounded: nothing was tested"


def test_thirty_updates_stay_within_what_rounding_allows():
    """The same gradients, whatever the weights are. A rounding of a moment fades by beta an update, so that after t
    updates a first moment, which is 1 at most here, is off by e1 = gap * (b + b^2 + ...) and a second by e2; an update
    by rate * (e1 / root + first * (1 / smaller root - 1 / root)), over the corrections of both."""
    settings: dict[str, Any] = SETTINGS | {"weight_decay": 0.0}
    exact = MasterOptimizer(make_model(torch.float32).parameters(), **settings)
    rounded = EightBitOptimizer(make_model(torch.float32).parameters(), **settings)
    start = [master.detach().clone() for master in exact.masters]
    allowed = [torch.zeros(master.shape).double() for master in exact.masters]
    first_error = second_error = 0.0
    for step in range(1, 31):
        first_error, second_error = BETAS[0] * first_error, BETAS[1] * second_error
        for optimizer in (exact, rounded):
            give_gradients(optimizer, step)
            optimizer.step(learning_rate=1e-2, max_grad_norm=torch.inf)
        corrections = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
        for index, master in enumerate(exact.masters):
            state = exact.adamw.state[master]
            first, second = state["exp_avg"].double().abs(), state["exp_avg_sq"].double()
            root, least = second.sqrt(), (second - second_error).clamp(min=1e-12).sqrt()
            moved = first_error / least + first * (1 / least - 1 / root)
            allowed[index] += 1e-2 * sqrt(corrections[1]) / corrections[0] * moved + 1e-6
        first_error += 1.02 * FIRST_GAP * corrections[0]
        second_error += 1.02 * SECOND_GAP * corrections[1]
    for master, other, begun, bound in zip(exact.masters, rounded.masters, start, allowed, strict=True):
        error, way = (master - other).double().abs(), (master - begun).double().abs()
        assert (error <= bound).all()
        assert error.mean() < 0.03 * way.mean(), "most roundings cancel"
    assert not torch.equal(exact.masters[0], rounded.masters[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_adamw_does(dtype: torch.dtype):
    first, second = make_model(dtype), make_model(dtype)
    exact = train(first, MasterOptimizer(first.parameters(), **SETTINGS), range(30))
    rounded = train(second, EightBitOptimizer(second.parameters(), **SETTINGS), range(30))
    assert exact[-1] < 0.5 * exact[0]
    assert rounded == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_resumes_bit_by_bit_and_is_as_large_as_counted(dtype: torch.dtype, tmp_path: Path):
    whole, parts, resumed = make_model(dtype), make_model(dtype), make_model(dtype)
    train(whole, EightBitOptimizer(whole.parameters(), **SETTINGS), range(8))
    first = EightBitOptimizer(parts.parameters(), **SETTINGS)
    train(parts, first, range(4))
    state = first.state_dict()
    assert state_bytes(state) == first.full_state_bytes
    path = save_checkpoint(
        tmp_path, 4, model_writer=lambda folder: None, model_bytes=0, state={"optimizer": state}, position={}
    )
    resumed.load_state_dict(parts.state_dict())
    train(parts, first, range(4, 5))  # what is saved is not what goes on
    second = EightBitOptimizer(resumed.parameters(), **SETTINGS)
    second.load_state_dict(load_checkpoint(path).state["optimizer"])
    train(resumed, second, range(4, 8))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_bytes_are_one_a_moment_and_its_scales():
    """5 x 91 weights and the biases keep float32 moments."""
    optimizer = EightBitOptimizer(make_model(torch.float32).parameters(), **SETTINGS)
    coded, small = 67 * 91, 91 + 91 * 5 + 5
    assert optimizer.full_state_bytes == 2 * (coded + 4 * 24) + 8 * small
    assert eight_bit_bytes(coded) == coded + 4 * 24
    halved = EightBitOptimizer(make_model(torch.bfloat16).parameters(), **SETTINGS)
    assert halved.full_state_bytes == optimizer.full_state_bytes + 4 * (coded + small)


def test_parameters_without_a_gradient_are_let_be():
    model = make_model(torch.float32)
    optimizer = EightBitOptimizer(model.parameters(), **SETTINGS)
    train(model, optimizer, range(2))
    model[0].requires_grad_(False)
    weight = next(model.parameters())
    before = weight.detach().clone()
    train(model, optimizer, range(2, 4))
    assert torch.equal(weight, before)


def test_what_the_library_cannot_update_is_refused():
    parameters = list(make_model(torch.float32).parameters())
    with pytest.raises(UserError, match=r'whole weights.*trainer\.sharding = "none"'):
        EightBitOptimizer(parameters, **SETTINGS, clip=lambda _: 1.0)
    with pytest.raises(UserError, match="float64"):
        EightBitOptimizer(make_model(torch.float64).parameters(), **SETTINGS)
    plain = MasterOptimizer(parameters, **SETTINGS)
    give_gradients(plain, 0)
    plain.step(learning_rate=1e-2, max_grad_norm=1.0)
    with pytest.raises(UserError, match="moments of 32 bits"):
        EightBitOptimizer(parameters, **SETTINGS).load_state_dict(plain.state_dict())


@pytest.mark.gpu
def test_a_gpu_updates_as_the_cpu_does():
    """There weights decay after the update, and not before: the square of the rate apart."""
    first, second = make_model(torch.float32), make_model(torch.float32).to("cuda")
    here, there = EightBitOptimizer(first.parameters(), **SETTINGS), EightBitOptimizer(second.parameters(), **SETTINGS)
    for step in range(3):
        give_gradients(here, step)
        for master, other in zip(here.masters, there.masters, strict=True):
            assert master.grad is not None
            other.grad = master.grad.to("cuda")
        for optimizer in (here, there):
            optimizer.step(learning_rate=1e-2, max_grad_norm=torch.inf)
    for left, right in zip(here.masters, there.masters, strict=True):
        torch.testing.assert_close(left, right.cpu(), rtol=1e-3, atol=3e-4)
