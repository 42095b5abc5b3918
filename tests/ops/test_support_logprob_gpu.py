"""`support_logprob` on CUDA: the same numbers, the same bits twice, NaN for a target that was not kept."""

# Shape letters: M scored tokens, C channels, V vocabulary.

import math
from typing import Any

import pytest
import torch
from tests.ops.eager_logprob import assert_close, largest_error, make_case
from tests.ops.masked_logprob import make_support, run_eager, run_support

from ratoon.ops import support_logprob
from ratoon.ops.logprob import kept_pairs, tiling
from ratoon.ops.logprob import support as support_module

pytestmark = pytest.mark.gpu

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "bias": True, "logit_scale": 1 / 6, "logit_softcap": 2.0},
    {"temperature": 0.2, "bias": True, "logit_scale": -1.5},
]


@pytest.fixture(autouse=True, params=["pairs", "tiles"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Single products in pieces that cut rows, or several masked tiles each way."""
    monkeypatch.setattr(support_module, "CUDA_WIDE_SHARE", {"pairs": math.inf, "tiles": 0.0}[request.param])
    monkeypatch.setattr(kept_pairs, "CUDA_PIECE_BYTES", 300 * 40 * 4)
    monkeypatch.setattr(tiling, "CUDA_TILE_ROWS", 64)
    monkeypatch.setattr(tiling, "CUDA_TILE_BYTES", 64 * 256 * 4)


@pytest.mark.parametrize("options", OPTIONS)
def test_float64_equals_the_masked_formula(options: dict[str, Any]):
    case = make_case(131, 33, 1031, **options)
    support = make_support(case.target_M, 1031)
    assert_close(run_support(case.to("cuda"), support), run_eager(case.to("cuda"), support), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_accurate_as_eager(options: dict[str, Any], dtype: torch.dtype):
    """Error budget: twice eager's error against fp64 on the same rounded inputs, plus one rounding of the result."""
    case = make_case(131, 40, 1031, **options).to(dtype)
    support = make_support(case.target_M, 1031)
    case = case.to("cuda")
    exact = run_eager(case.to(torch.float64), support).named()
    eager, ours = run_eager(case, support).named(), run_support(case, support).named()
    band = max(torch.finfo(dtype).eps / 2, 8 * 2.0**-24)
    for name, value in exact.items():
        budget = 2 * largest_error(eager[name], value) + band * float(value.abs().max())
        assert largest_error(ours[name], value) <= budget, name


def test_twice_the_same_bits():
    """Without torch.use_deterministic_algorithms: no operation here adds by atomics."""
    case = make_case(500, 40, 700, bias=True).to(torch.float32)
    support = make_support(case.target_M, 700)
    first, second = (run_support(case.to("cuda"), support).named() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_target_that_was_not_kept_is_nan():
    case = make_case(4, 8, 31).to(torch.float32)
    support = make_support(case.target_M, 31, most=3)
    case = case.to("cuda")
    case.target_M[2] = next(token for token in range(31) if token not in support.token_ids)
    logprobs_M, _ = support_logprob(case.hidden_MC, case.weight_VC, case.target_M, support)
    assert logprobs_M.isnan().tolist() == [False, False, True, False]
