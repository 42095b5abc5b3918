"""`linear_logprob` on CUDA: the same numbers, no wait for the device, no [M, V]."""

# Shape letters: M scored tokens, C channels, V vocabulary.

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.eager_logprob import assert_close, largest_error, make_case, run_eager, run_ours

from ratoon.ops import linear_logprob
from ratoon.ops.logprob import projection, tiling

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


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_as_accurate_as_torch_operations(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """The same products, the same roundings; sums in another order."""
    case = make_case(131, 40, 1031, **options).to(dtype).to("cuda")
    exact, fused = run_eager(case.to(torch.float64)).named(), run_ours(case).named()
    monkeypatch.setattr(projection, "has_tile_kernels", lambda *_: False)
    plain = run_ours(case).named()
    for name, value in exact.items():
        # One rounding of the result: gradients of the bias are sums of rounded ones in the kernels' path.
        band = torch.finfo(dtype).eps / 2 if name.startswith("grad") else 4 * 2.0**-24
        budget = 1.5 * largest_error(plain[name], value) + band * float(value.abs().max())
        assert largest_error(fused[name], value) <= budget, name


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_softcap": 30.0}])
def test_a_model_s_vocabulary(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """M 2,000, V 151,936 in the tiles that users get: within eager's budget, rows one by one."""
    monkeypatch.undo()
    case = make_case(2_000, 512, 151_936, spread=3.0, **options).to(torch.bfloat16).to("cuda")
    ours = run_ours(case).named()
    eager, exact = run_eager(case).named(), run_eager(case.to(torch.float64)).named()
    for name, value in exact.items():
        band = 2.0**-9 if name.startswith("grad") else 8 * 2.0**-24
        budget = 2 * largest_error(eager[name], value) + band * float(value.abs().max())
        assert largest_error(ours[name], value) <= budget, name
    # Log-probs do not suffer from bf16 logits as eager's do.
    assert largest_error(ours["logprobs_M"], exact["logprobs_M"]) < 2e-5


def test_broken_row_is_nan_alone():
    """Through the kernels' maxima, which drop NaN, and their dropping of what is negligible, which must not."""
    case = make_case(131, 40, 1031).to(torch.bfloat16).to("cuda")
    case.hidden_MC[17, 3] = torch.nan
    case.hidden_MC[130, 3] = torch.inf
    ours = run_ours(case)
    for value in (ours.logprobs_M, ours.entropy_M, ours.grad_hidden_MC.float().sum(dim=1)):
        assert value.isnan().nonzero().flatten().tolist() == [17, 130]


def test_targets_and_weights_must_be_on_one_device():
    case = make_case(6, 5, 23).to("cuda")
    with pytest.raises(ValueError, match="target must be on hidden's device cuda:0, got cpu"):
        run_ours(replace(case, target_M=case.target_M.cpu()))


@pytest.mark.parametrize(("M", "V"), [(16_384, 151_936), (20_000, 50_257), (300, 151_936), (40_000, 1_000)])
def test_tiles_fit_their_budget(M: int, V: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    hidden_MC, weight_VC = (torch.empty(n, 64, dtype=torch.bfloat16, device="cuda") for n in (M, V))
    chosen = tiling.Tiling.choose(hidden_MC, weight_VC, torch.float32)
    assert chosen.rows <= tiling.CUDA_TILE_ROWS
    assert 4 * chosen.numel <= tiling.CUDA_TILE_BYTES
    assert chosen.columns == V or chosen.columns % tiling.CUDA_MIN_STEP == 0


def test_peak_memory(monkeypatch: pytest.MonkeyPatch):
    """M 16,384, C 2,048, V 151,936, bf16: fp32 logits would be 10 GB; under 1.4 GiB, 0.65 of them the gradients."""
    monkeypatch.undo()
    M, C, V = 16_384, 2_048, 151_936
    hidden_MC = torch.randn(M, C, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight_VC = torch.randn(V, C, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target_M = torch.randint(0, V, (M,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs_M, entropy_M = linear_logprob(hidden_MC, weight_VC, target_M)
    (logprobs_M + entropy_M).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.4 * (1 << 30)
