"""Products, means and log-probs of rows: right, and the same bits in whatever company."""

# Shape letters: M rows, N columns, K what a product sums over, C channels, V vocabulary.

import pytest
import torch
from tests.sampling import sampled
from torch import Tensor

from ratoon.ops.invariant.entry import linear, matmul, row_mean, score_tokens
from ratoon.ops.sampling.entry import draw_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 3, 64, 130)


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), sampled((37, 77), (300, 576), (128, 64), (1, 5)))
def test_rows_of_a_product_do_not_know_each_other(N: int, K: int, dtype: torch.dtype, device: str):
    x_MK, weight_NK = (draw(rows, K, device=device, dtype=dtype) for rows in (max(COUNTS), N))
    bias_N = draw(N, device=device, dtype=dtype, seed=1)
    whole_MN = matmul(x_MK, weight_NK, bias_N, out_dtype=torch.float32)
    wanted_MN = x_MK.double() @ weight_NK.double().T + bias_N.double()
    # Tensor cores cut their sums off after each step.
    rounding = 1e-5 if dtype == torch.float32 else 1e-4
    assert torch.allclose(whole_MN.double(), wanted_MN, rtol=1e-5, atol=rounding * K**0.5)
    rounded_MN = matmul(x_MK, weight_NK, bias_N, out_dtype=dtype)
    if device == "cuda" or dtype == torch.float32:
        assert torch.equal(rounded_MN, whole_MN.to(dtype)), "the output is rounded once"
    else:  # the interpreter cuts bf16 off
        assert torch.allclose(rounded_MN.float(), whole_MN, rtol=2**-7)
    for M in COUNTS:
        for start in {0, (max(COUNTS) - M) // 2, max(COUNTS) - M}:
            part_MN = matmul(x_MK[start : start + M], weight_NK, bias_N, out_dtype=torch.float32)
            assert torch.equal(part_MN, whole_MN[start : start + M]), f"{M} rows from {start}"


@pytest.mark.parametrize("device", DEVICES)
def test_a_linear_layer_has_the_gradients_of_torchs(device: str):
    x = draw(2, 9, 20, device=device, dtype=torch.float32).requires_grad_()
    weight_NK = draw(7, 20, device=device, dtype=torch.float32, seed=1).requires_grad_()
    bias_N = draw(7, device=device, dtype=torch.float32, seed=2).requires_grad_()
    upstream = draw(2, 9, 7, device=device, dtype=torch.float32, seed=3)
    found, wanted = (
        (out, *torch.autograd.grad(out, (x, weight_NK, bias_N), upstream))
        for out in (linear(x, weight_NK, bias_N), torch.nn.functional.linear(x, weight_NK, bias_N))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("C", sampled(96, 576, 4100, 1))
def test_means_of_rows(C: int, device: str):
    x_MC = draw(37, C, device=device, dtype=torch.float32)
    mean_M1 = row_mean(x_MC)
    assert torch.allclose(mean_M1.double(), x_MC.double().mean(-1, keepdim=True), rtol=1e-6, atol=1e-6)
    for start, end in ((0, 1), (5, 6), (3, 36)):
        assert torch.equal(row_mean(x_MC[start:end]), mean_M1[start:end])
    leaf_MC = x_MC.clone().requires_grad_()
    (grad_MC,) = torch.autograd.grad(row_mean(leaf_MC).square().sum(), leaf_MC)
    assert torch.allclose(grad_MC, (2 * mean_M1 / C).expand(-1, C), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", sampled(2049, 5, 49_152))
def test_scores_are_those_of_draws(V: int, device: str):
    """To rounding, at each row's own temperature; and the bits of a row are its own."""
    logits_MV = 3 * draw(12, V, device=device, dtype=torch.float32)
    temperature_M = torch.tensor([1.0, 0.3, 2.0] * 4, dtype=torch.float64, device=device)
    numbers_M = torch.arange(12, device=device)
    token_M, drawn_M = draw_tokens(logits_MV, temperature_M, numbers_M * 7919, numbers_M)
    scored_M = score_tokens(logits_MV, token_M, temperature_M)
    assert torch.allclose(scored_M, drawn_M, rtol=0, atol=1e-6)
    wanted_M = (logits_MV.double() / temperature_M[:, None]).log_softmax(-1).gather(1, token_M[:, None])[:, 0]
    assert torch.allclose(scored_M.double(), wanted_M, rtol=1e-6, atol=1e-6)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 11)):
        assert torch.equal(score_tokens(logits_MV[rows], token_M[rows], temperature_M[rows]), scored_M[rows])


def test_a_greedy_row_is_certain():
    logits_MV = torch.tensor([[0.0, 3.0, 1.0]])
    assert score_tokens(logits_MV, torch.tensor([1]), torch.zeros(1, dtype=torch.float64)).tolist() == [0.0]


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"one dtype of bfloat16, float16 and float32, got torch.float64"):
        linear(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64))
