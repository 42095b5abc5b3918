"""Master weights, clipping, decay and the learning-rate schedule."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.models.test_adapters import GROUPS, adapted
from torch import Tensor, nn

from ratoon.layout import pack_groups
from ratoon.models import forward_logprobs
from ratoon.trainer import MasterOptimizer, TrainerConfig
from ratoon.trainer.optimizer import learning_rate_at, scheduled_rate

torch.set_num_threads(1)

UNCLIPPED = math.inf


def make_parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """A matrix and a vector of weights near 1."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((1 + 0.1 * torch.randn(shape, generator=generator)).to(dtype)) for shape in ((5, 3), (7,))]


def make_optimizer(parameters: list[nn.Parameter], weight_decay: float = 0.0) -> MasterOptimizer:
    return MasterOptimizer(parameters, learning_rate=1.0, weight_decay=weight_decay, betas=(0.9, 0.95))


def give_gradients(optimizer: MasterOptimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.accumulate()


def values(tensors: list[Any]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def test_small_learning_rates_move_a_bfloat16_model():
    """One update of 1e-6 is far below bfloat16's spacing at 1; thousands of them are not."""
    parameters = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    optimizer = make_optimizer(parameters)
    for _ in range(100):
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.accumulate()
        optimizer.step(learning_rate=1e-6, max_grad_norm=UNCLIPPED)
    assert torch.equal(parameters[0], torch.ones_like(parameters[0])), "not visible in 8 bits yet"
    torch.testing.assert_close(optimizer.masters[0], torch.full((4, 4), 1 - 100e-6), rtol=0, atol=2e-6)
    for _ in range(300):
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.accumulate()
        optimizer.step(learning_rate=1e-5, max_grad_norm=UNCLIPPED)
    assert (parameters[0] < 1).all(), "the sum of the updates reaches the model"
    assert torch.equal(parameters[0], optimizer.masters[0].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_are_their_own_masters(dtype: torch.dtype):
    parameters = make_parameters(dtype)
    optimizer = make_optimizer(parameters)
    assert all(master is parameter for master, parameter in zip(optimizer.masters, parameters, strict=True))
    assert optimizer.state_dict()["masters"] == [None, None]
    reference = [nn.Parameter(value) for value in values(parameters)]
    adamw = torch.optim.AdamW(reference, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        give_gradients(optimizer, seed)
        for ours, theirs in zip(parameters, reference, strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.clone()
        optimizer.step(learning_rate=0.01, max_grad_norm=UNCLIPPED)
        adamw.step()
    for ours, theirs in zip(parameters, reference, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_microbatches_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = make_optimizer([parameter])
    for value in (256.0, *[1.0] * 7):
        parameter.grad = torch.full_like(parameter, value)
        optimizer.accumulate()
        assert parameter.grad is None
    assert optimizer.masters[0].grad is not None
    assert optimizer.masters[0].grad.item() == 263
    assert optimizer.step(learning_rate=0.0, max_grad_norm=UNCLIPPED) == 263
    assert optimizer.masters[0].grad is None, "the next step starts from nothing"


def test_frozen_parameters_are_left_out():
    parameters = make_parameters(torch.float32)
    parameters[0].requires_grad_(False)
    assert make_optimizer(parameters).parameters == [parameters[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_restored_optimizer_continues_bitwise(dtype: torch.dtype):
    parameters = make_parameters(dtype)
    optimizer = make_optimizer(parameters, weight_decay=0.1)
    for seed in range(3):
        give_gradients(optimizer, seed)
        optimizer.step(learning_rate=1e-3, max_grad_norm=1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    other_parameters = [nn.Parameter(value) for value in values(parameters)]
    other = make_optimizer(other_parameters, weight_decay=0.1)
    other.load_state_dict(saved)
    for seed in range(3, 6):
        for each in (optimizer, other):
            give_gradients(each, seed)
            each.step(learning_rate=1e-3, max_grad_norm=1.0)
    for ours, theirs in zip(
        [*optimizer.parameters, *optimizer.masters], [*other.parameters, *other.masters], strict=True
    ):
        assert torch.equal(ours, theirs)
    if dtype == torch.bfloat16:  # the masters hold more than the model's own weights
        assert not torch.equal(optimizer.masters[0], optimizer.parameters[0].float())


@pytest.mark.parametrize("is_fused", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fused_and_other_optimizers_read_one_anothers_checkpoints(
    dtype: torch.dtype, is_fused: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
):
    """GPUs update by one fused kernel since it was chosen; checkpoints from before hold `step` on the host."""

    def make(parameters: list[nn.Parameter], is_fused: bool) -> MasterOptimizer:
        monkeypatch.setattr("ratoon.trainer.optimizer.has_fused_update", lambda _: is_fused)
        optimizer = make_optimizer(parameters, weight_decay=0.1)
        assert [group["fused"] for group in optimizer.adamw.param_groups] == [is_fused or None] * 2
        return optimizer

    def train(optimizer: MasterOptimizer, seeds: range) -> None:
        for seed in seeds:
            give_gradients(optimizer, seed)
            optimizer.step(learning_rate=1e-2, max_grad_norm=1.0)

    whole = make(make_parameters(dtype), False)
    train(whole, range(6))
    first = make(make_parameters(dtype), is_fused[0])
    train(first, range(3))
    second = make([nn.Parameter(value) for value in values(first.parameters)], is_fused[1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [group["fused"] for group in second.adamw.param_groups] == [is_fused[1] or None] * 2
    train(second, range(3, 6))
    assert {float(state["step"]) for state in second.adamw.state.values()} == {6.0}
    for found, expected in zip(second.masters, whole.masters, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpus_update_is_fused_and_goes_on_from_others(dtype: torch.dtype):
    """Against the update of the host, from a checkpoint whose `step` is there, at the same gradients."""
    host = make_optimizer(make_parameters(dtype), weight_decay=0.1)
    give_gradients(host, 0)
    host.step(learning_rate=1e-2, max_grad_norm=1.0)
    gpu = make_optimizer([nn.Parameter(value.cuda()) for value in values(host.parameters)], weight_decay=0.1)
    assert all(group["fused"] for group in gpu.adamw.param_groups)
    gpu.load_state_dict(copy.deepcopy(host.state_dict()))
    for seed in (1, 2):
        give_gradients(host, seed)
        for master, of_host in zip(gpu.masters, host.masters, strict=True):
            assert of_host.grad is not None
            master.grad = of_host.grad.cuda()
        for optimizer in (host, gpu):
            optimizer.step(learning_rate=1e-2, max_grad_norm=1.0)
    for found, expected in zip(gpu.masters, host.masters, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_is_not_finite_is_refused(bad: float, dtype: torch.dtype):
    parameters = make_parameters(dtype)
    optimizer = make_optimizer(parameters, weight_decay=0.1)
    give_gradients(optimizer, 0)
    optimizer.step(learning_rate=0.01, max_grad_norm=1.0)
    before = values([*parameters, *optimizer.masters])
    state = copy.deepcopy(optimizer.state_dict()["adamw"]["state"])
    give_gradients(optimizer, 1)
    gradient = optimizer.masters[1].grad
    assert gradient is not None
    gradient[2] = bad
    with pytest.raises(FloatingPointError, match=r"norm is .* weights were left as they are\. .* with --fresh"):
        optimizer.step(learning_rate=0.01, max_grad_norm=1.0)
    for now, then in zip([*parameters, *optimizer.masters], before, strict=True):
        assert torch.equal(now, then)
        assert now.grad is None, "the bad gradient must not be added to the next"
    for index, moments in optimizer.state_dict()["adamw"]["state"].items():
        assert all(torch.equal(moment, state[index][name]) for name, moment in moments.items())


@pytest.mark.parametrize("max_grad_norm", [0.3, 1e6, UNCLIPPED])
def test_clipping_is_torchs(max_grad_norm: float):
    """SGD would show the scale; AdamW's first moment does."""
    parameters = make_parameters(torch.float32)
    optimizer = make_optimizer(parameters)
    give_gradients(optimizer, 4)
    gradients = values([parameter.grad for parameter in parameters])
    clones = [nn.Parameter(value) for value in values(parameters)]
    for clone, gradient in zip(clones, gradients, strict=True):
        clone.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(clones, max_grad_norm).item()
    assert optimizer.step(learning_rate=0.1, max_grad_norm=max_grad_norm) == expected
    assert expected == pytest.approx(math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients)))
    for parameter, clone in zip(parameters, clones, strict=True):
        assert clone.grad is not None
        torch.testing.assert_close(optimizer.adamw.state[parameter]["exp_avg"], 0.1 * clone.grad)


def test_decay_acts_on_matrices_only():
    parameters = make_parameters(torch.float32)
    before = values(parameters)
    optimizer = make_optimizer(parameters, weight_decay=0.5)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(learning_rate=0.1, max_grad_norm=1.0)
    torch.testing.assert_close(parameters[0].detach(), before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(parameters[1], before[1])


def test_an_update_without_gradients_changes_nothing():
    parameters = make_parameters(torch.bfloat16)
    before = values(parameters)
    assert make_optimizer(parameters, weight_decay=0.5).step(learning_rate=0.1, max_grad_norm=1.0) == 0
    assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "num_steps", "rates"),
    [
        ("constant", 0, 3, [2, 2, 2, 2]),
        ("constant", 3, 5, [0.5, 1, 1.5, 2, 2]),
        ("linear", 0, 4, [2, 1.5, 1, 0.5, 0]),
        ("linear", 1, 5, [1, 2, 1.5, 1, 0.5, 0]),
        ("cosine", 0, 4, [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]),
        ("cosine", 1, 3, [1, 2, 1, 0]),
        ("linear", 4, 4, [0.4, 0.8, 1.2, 1.6, 2]),  # nothing is left to fall in
        ("cosine", 2, 0, [2 / 3, 4 / 3, 2]),
        ("linear", 0, 0, [2]),
    ],
)
def test_rates_at_the_borders(schedule: Any, warmup_steps: int, num_steps: int, rates: list[float]):
    found = [
        scheduled_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps)
        for step in range(len(rates))
    ]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_can_end_above_zero(schedule: Any):
    rates = [
        scheduled_rate(step, peak=2.0, schedule=schedule, warmup_steps=0, num_steps=8, final_fraction=0.1)
        for step in range(9)
    ]
    assert rates[0] == 2 and rates[8] == pytest.approx(0.2) and rates[4] == pytest.approx(1.1)
    assert rates == sorted(rates, reverse=True)


def test_every_step_of_a_run_has_a_rate_above_zero():
    config = TrainerConfig(num_steps=7, learning_rate=3e-4, schedule="linear", warmup_steps=2)
    rates = [learning_rate_at(step, config) for step in range(config.num_steps)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 2.4e-4, 1.8e-4, 1.2e-4, 0.6e-4])
    assert learning_rate_at(0, TrainerConfig(num_steps=0)) == TrainerConfig().learning_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_are_trained(dtype: torch.dtype):
    """Nothing is kept for a frozen weight, its gradient is none of the norm, and it stays as it is, bit by bit."""
    model = adapted("qwen3", dtype=dtype)
    frozen = {name: value.detach().clone() for name, value in model.named_parameters() if not value.requires_grad}
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.5, betas=(0.9, 0.95))
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    assert len(optimizer.parameters) == len(names) and all("lora_" in name for name in names)
    assert {master.dtype for master in optimizer.masters} == {torch.float32}
    layout = pack_groups(GROUPS)
    for step in range(3):
        forward_logprobs(model, layout)[0].sum().backward()
        gradients = [parameter.grad.double() for parameter in optimizer.parameters if parameter.grad is not None]
        expected_norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        optimizer.accumulate()
        norm = optimizer.step(learning_rate=0.01, max_grad_norm=1.0)
        assert norm == pytest.approx(expected_norm, rel=1e-3) and norm > 0, step
    assert set(optimizer.adamw.state) == set(optimizer.masters)
    for name, value in model.named_parameters():
        if name in frozen:
            assert torch.equal(value, frozen[name]) and value.grad is None, name
        else:
            assert value.any(), name


def test_adapters_of_16_bits_gather_small_updates():
    model = adapted("qwen3", dtype=torch.bfloat16)
    optimizer = MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95))
    first = next(index for index, parameter in enumerate(optimizer.parameters) if parameter.any())
    before = optimizer.parameters[first].detach().clone()
    for _ in range(50):
        for parameter in optimizer.parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.accumulate()
        optimizer.step(learning_rate=1e-7, max_grad_norm=UNCLIPPED)
    moved = (optimizer.masters[first] - before.float()).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 50e-7), rtol=0.1, atol=0)
