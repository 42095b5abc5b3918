"""`linear_logprob` on CUDA: the same numbers, no wait for the device, no [M, V]."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.eager_logprob import assert_close, largest_error, make_case, run_eager, run_ours

from ratoon.ops import linear_logprob
from ratoon.ops.logprob import tiling

pytestmark = pytest.mark.gpu

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "bias": True, "logit_scale": 1 / 6, "logit_softcap": 2.0},
    {"temperature": 0.2, "bias": True, "logit_scale": -1.5},
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Several tiles each way, neither of which divides its size."""
    monkeypatch.setattr(tiling, "CUDA_TILE_ROWS", 64)
    monkeypatch.setattr(tiling, "CUDA_TILE_BYTES", 64 * 256 * 4)


@pytest.mark.parametrize("options", OPTIONS)
def test_float64_equals_the_formula(options: dict[str, Any]):
    case = make_case(131, 33, 1031, **options)
    assert_close(run_ours(case.to("cuda")), run_eager(case.to("cuda")), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_accurate_as_eager(options: dict[str, Any], dtype: torch.dtype):
    """Error budget: twice eager's error against fp64 on the same rounded inputs, plus one rounding of the result."""
    case = make_case(131, 40, 1031, **options).to(dtype).to("cuda")
    exact = run_eager(case.to(torch.float64)).named()
    eager, ours = run_eager(case).named(), run_ours(case).named()
    band = max(torch.finfo(dtype).eps / 2, 8 * 2.0**-24)
    for name, value in exact.items():
        budget = 2 * largest_error(eager[name], value) + band * float(value.abs().max())
        assert largest_error(ours[name], value) <= budget, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype: torch.dtype):
    """Forward and backward under PyTorch's synchronisation detector."""
    case = make_case(131, 40, 1031, bias=True).to(dtype).to("cuda")
    run_ours(case)  # libraries initialise themselves
    hidden_MC, weight_VC = case.hidden_MC.requires_grad_(), case.weight_VC.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs_M, entropy_M = linear_logprob(hidden_MC, weight_VC, case.target_M, bias=case.bias_V)
        (logprobs_M + entropy_M).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("target", [-100, -1, 1031, 10**9])
def test_target_outside_the_vocabulary_is_nan(target: int):
    """Raising would need the value on the host. The other rows are not touched."""
    case = make_case(131, 40, 1031).to("cuda")
    target_M = case.target_M.clone()
    target_M[17] = target
    logprobs_M, entropy_M = linear_logprob(case.hidden_MC, case.weight_VC, target_M)
    assert logprobs_M.isnan().nonzero().flatten().tolist() == [17]
    assert entropy_M.isfinite().all()


def test_deterministic_algorithms_are_used():
    """Nothing here is refused by PyTorch's deterministic mode, and two runs agree to the bit."""
    case = make_case(131, 40, 1031, bias=True, logit_softcap=3.0).to(torch.bfloat16).to("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run_ours(case).named(), run_ours(case).named()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_targets_and_weights_must_be_on_one_device():
    case = make_case(6, 5, 23).to("cuda")
    with pytest.raises(ValueError, match="target must be on hidden's device cuda:0, got cpu"):
        run_ours(replace(case, target_M=case.target_M.cpu()))


def test_peak_memory(monkeypatch: pytest.MonkeyPatch):
    """M 16,384, C 2,048, V 151,936, bf16: fp32 logits would be 10 GB; under 2 GiB with the gradients."""
    monkeypatch.undo()
    M, C, V = 16_384, 2_048, 151_936
    hidden_MC = torch.randn(M, C, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight_VC = torch.randn(V, C, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target_M = torch.randint(0, V, (M,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs_M, entropy_M = linear_logprob(hidden_MC, weight_VC, target_M)
    (logprobs_M + entropy_M).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
