"""Tokens drawn by the kernels are those that the host's draws take."""

import numpy as np
import pytest
import torch
from tests.sampling import sampled

from ratoon.ops.sampling.entry import draw_tokens
from ratoon.rollout.draws import response_key, sample_tokens, uniform_draws

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(logits_BV: torch.Tensor, temperature_B: torch.Tensor, first_position: int, device: str):
    B = logits_BV.shape[0]
    keys = np.array([response_key(3, 1, "p", index) for index in range(B)], np.uint64)
    positions = np.arange(first_position, first_position + B)
    uniform = torch.from_numpy(uniform_draws(keys, positions))
    wanted = sample_tokens(logits_BV.float(), temperature_B, uniform)
    got = draw_tokens(
        logits_BV.to(device),
        temperature_B.to(device),
        torch.from_numpy(keys.view(np.int64)).to(device),
        torch.from_numpy(positions).to(device),
    )
    return [tensor.cpu() for tensor in got], wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", [1, 7, 2048, 2049, 10_000])
@pytest.mark.parametrize("spread", sampled(1.0, 0.0, 12.0))
def test_as_the_host_draws(V: int, spread: float, device: str):
    logits_BV = spread * torch.randn(24, V, generator=torch.Generator().manual_seed(V))
    temperature_B = torch.tensor([1.0, 0.3, 2.0, 0.0] * 6, dtype=torch.float64)
    got, wanted = drawn(logits_BV, temperature_B, 5, device)
    assert torch.equal(got[0], wanted[0])
    assert torch.allclose(got[1], wanted[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_without_a_chance_are_never_drawn(device: str):
    logits_BV = torch.full((64, 5000), -torch.inf)
    logits_BV[:, [3, 2047, 2048, 4999]] = 0.0
    got, wanted = drawn(logits_BV, torch.ones(64, dtype=torch.float64), 0, device)
    assert torch.equal(got[0], wanted[0]) and set(got[0].tolist()) == {3, 2047, 2048, 4999}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_show(device: str, bad: float):
    logits_BV = torch.zeros(2, 3000)
    logits_BV[1, 2500] = bad
    got, _ = drawn(logits_BV, torch.ones(2, dtype=torch.float64), 0, device)
    assert got[1].isfinite().tolist() == [True, False]
    assert ((got[0] >= 0) & (got[0] < 3000)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lowest_id_and_rows_may_be_strided(device: str):
    logits_BV = torch.zeros(4, 6000).bfloat16()
    logits_BV[:, [2100, 4500]] = 1.0
    got, _ = drawn(logits_BV[::2], torch.zeros(2, dtype=torch.float64), 0, device)
    assert got[0].tolist() == [2100, 2100] and got[1].tolist() == [0.0, 0.0]
