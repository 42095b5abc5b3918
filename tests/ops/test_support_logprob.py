"""`support_logprob`: values and gradients against the masked formula in float64, its memory, and its refusals."""

# Shape letters: M scored tokens, C channels, V vocabulary, J kept pairs.

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.eager_logprob import assert_close, largest_error, make_case, run_ours
from tests.ops.masked_logprob import kept_mask, make_support, run_eager, run_support, whole_vocabulary
from tests.ops.test_linear_logprob_memory import MIB, LargestResult, needs_proc
from torch import Tensor

from ratoon.ops import linear_logprob, support_logprob
from ratoon.ops.logprob import kept_pairs, tiling
from ratoon.ops.logprob import support as support_module
from ratoon.types import SampledSupport

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"bias": True},
    {"logit_scale": 0.0625},
    {"logit_softcap": 3.0},
    {"temperature": 1.3, "bias": True, "logit_scale": 1 / 6, "logit_softcap": 2.0},
    {"temperature": 0.2, "bias": True, "logit_scale": -1.5},
]


@pytest.fixture(autouse=True, params=["pairs", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Single products of the kept pairs, or masked tiles of all logits: every test holds for both."""
    monkeypatch.setattr(support_module, "CPU_WIDE_SHARE", {"pairs": math.inf, "tiles": 0.0}[request.param])
    return request.param


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    """torch.empty returns NaN, so that memory read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("piece_pairs", [None, 1, 2, 7, 40])
@pytest.mark.parametrize("options", OPTIONS)
def test_float64_equals_the_masked_formula(options: dict[str, Any], piece_pairs: int | None):
    """Also where a token's kept set, and a token of the vocabulary, is cut by the pieces."""
    case = make_case(13, 7, 61, **options)
    support = make_support(case.target_M, 61)
    assert_close(run_support(case, support, piece_pairs), run_eager(case, support), rtol=1e-12)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 40)),
    piece_pairs=st.integers(1, 50),
    temperature=st.floats(0.1, 5.0),
    logit_scale=st.floats(-2.0, 2.0),
    logit_softcap=st.one_of(st.none(), st.floats(0.5, 50.0)),
    bias=st.booleans(),
    spread=st.floats(0.0, 30.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_piece_and_option(sizes: tuple[int, int, int], piece_pairs: int, seed: int, **options: Any):
    case = make_case(*sizes, seed=seed, **options)
    support = make_support(case.target_M, sizes[2], seed=seed)
    assert_close(run_support(case, support, piece_pairs), run_eager(case, support), rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_lower_precision_is_as_accurate_as_eager(options: dict[str, Any], dtype: torch.dtype):
    """Error budget: twice eager's error against fp64 on the same rounded inputs, plus a few roundings."""
    rounded = make_case(67, 33, 1031, **options).to(dtype)
    support = make_support(rounded.target_M, 1031)
    exact = run_eager(rounded.to(torch.float64), support).named()
    eager, ours = run_eager(rounded, support).named(), run_support(rounded, support, 300).named()
    band = 8 * 2.0**-24 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for name, value in exact.items():
        assert ours[name].dtype == (torch.float32 if name in ("logprobs_M", "entropy_M") else dtype)
        budget = 2 * largest_error(eager[name], value) + band * float(value.abs().max())
        assert largest_error(ours[name], value) <= budget, name


def test_low_precision_weight_gradient_is_summed_wide():
    """Many rows add up in fp32 and are rounded once, also where a token's rows lie in several pieces."""
    case = make_case(1500, 8, 5).to(torch.bfloat16)
    support = make_support(case.target_M, 5)
    exact = run_eager(case.to(torch.float64), support).grad_weight_VC
    got = run_support(case, support, 64).grad_weight_VC
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_whole_vocabulary_is_linear_logprob(options: dict[str, Any]):
    for dtype, rtol in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        case = make_case(23, 33, 301, **options).to(dtype)
        assert_close(run_support(case, whole_vocabulary(23, 301)), run_ours(case), rtol=rtol)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, Any]):
    """Both results, by finite differences."""
    case = make_case(5, 4, 11, spread=1.0, **options)
    support = make_support(case.target_M, 11, seed=3)
    inputs = [x.requires_grad_() for x in (case.hidden_MC, case.weight_VC, case.bias_V) if x is not None]

    def score(hidden_MC: Tensor, weight_VC: Tensor, bias_V: Tensor | None = None):
        return support_logprob(hidden_MC, weight_VC, case.target_M, support, bias=bias_V, **case.options)

    assert torch.autograd.gradcheck(score, inputs)


@pytest.mark.parametrize("used", [0, 1])
def test_loss_may_use_one_result_only(used: int):
    case = make_case(6, 5, 23, logit_softcap=2.0)
    support = make_support(case.target_M, 23)
    case.loss_weights_2M[1 - used] = 0
    expected = run_eager(case, support)
    inputs = [case.hidden_MC.clone().requires_grad_(), case.weight_VC.clone().requires_grad_()]
    score = support_logprob(inputs[0], inputs[1], case.target_M, support, logit_softcap=2.0)[used]
    (case.loss_weights_2M[used] * score).sum().backward()
    for tensor, grad in zip(inputs, (expected.grad_hidden_MC, expected.grad_weight_VC), strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_input_can_be_the_only_one_trained(needed: tuple[bool, bool, bool]):
    case = make_case(6, 5, 23, bias=True)
    support = make_support(case.target_M, 23)
    expected = run_eager(case, support)
    assert case.bias_V is not None
    inputs = [
        x.clone().requires_grad_(n) for x, n in zip((case.hidden_MC, case.weight_VC, case.bias_V), needed, strict=True)
    ]
    logprobs_M, entropy_M = support_logprob(inputs[0], inputs[1], case.target_M, support, bias=inputs[2])
    (case.loss_weights_2M[0] * logprobs_M + case.loss_weights_2M[1] * entropy_M).sum().backward()
    expected_grads = (expected.grad_hidden_MC, expected.grad_weight_VC, expected.grad_bias_V)
    for tensor, is_needed, grad in zip(inputs, needed, expected_grads, strict=True):
        if is_needed:
            torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=1e-12)
        else:
            assert tensor.grad is None


def test_one_kept_token_is_certain_and_teaches_nothing():
    """Its neighbours' logits are not part of the distribution, so no gradient reaches any weight."""
    case = make_case(4, 5, 23, bias=True)
    alone = SampledSupport(np.arange(5), case.target_M.numpy())
    ours = run_support(case, alone)
    for name, value in ours.named().items():
        assert value.abs().max() < 1e-14, name


def test_tokens_left_out_have_no_gradient():
    case = make_case(9, 5, 50, bias=True)
    support = make_support(case.target_M, 50, most=4)
    ours = run_support(case, support)
    left_out = np.setdiff1d(np.arange(50), support.token_ids)
    assert left_out.size > 10
    assert ours.grad_bias_V is not None
    assert not ours.grad_weight_VC[left_out].any() and not ours.grad_bias_V[left_out].any()


def test_truncation_on_one_side_only_biases_the_ratio():
    """TRL#6789, verl#6240: against the whole vocabulary every ratio is off by the log of the kept mass."""
    case = make_case(40, 8, 60, temperature=0.7)
    support = make_support(case.target_M, 60, most=20)
    kept_M, _ = support_logprob(case.hidden_MC, case.weight_VC, case.target_M, support, temperature=0.7)
    whole_M, _ = linear_logprob(case.hidden_MC, case.weight_VC, case.target_M, temperature=0.7)
    probs_MV = torch.softmax(case.hidden_MC @ case.weight_VC.T / 0.7, dim=-1)
    kept_mass_M = (probs_MV * kept_mask(support, 60)).sum(-1)
    torch.testing.assert_close(kept_M - whole_M, -kept_mass_M.log(), rtol=1e-12, atol=1e-12)
    assert (kept_M - whole_M).min() > 0.01


def test_far_apart_and_masked_logits_make_no_nan():
    case = make_case(6, 5, 23, bias=True, spread=500.0)
    assert case.bias_V is not None
    case.bias_V[case.target_M[0] + 1 if case.target_M[0] < 22 else 0] = float("-inf")
    ours = run_support(case, whole_vocabulary(6, 23))
    assert all(value.isfinite().all() for value in ours.named().values())


def test_nan_stays_in_its_own_row():
    case = make_case(5, 4, 11).to(torch.float32)
    case.hidden_MC[2] = float("nan")
    ours = run_support(case, make_support(case.target_M, 11))
    for result in (ours.logprobs_M, ours.entropy_M, ours.grad_hidden_MC.sum(1)):
        assert result.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows(dtype: torch.dtype):
    case = make_case(0, 5, 23, bias=True).to(dtype)
    ours = run_support(case, SampledSupport(np.zeros(1, np.int64), np.empty(0, np.int32)))
    assert ours.logprobs_M.shape == ours.entropy_M.shape == (0,)
    assert ours.grad_hidden_MC.shape == (0, 5)
    assert torch.equal(ours.grad_weight_VC, torch.zeros(23, 5, dtype=dtype))
    assert ours.grad_bias_V is not None and torch.equal(ours.grad_bias_V, torch.zeros(23, dtype=dtype))


def test_results_may_be_changed_in_place():
    case = make_case(6, 5, 23)
    support = make_support(case.target_M, 23)
    hidden_MC = case.hidden_MC.requires_grad_()
    expected = torch.autograd.grad(
        support_logprob(hidden_MC, case.weight_VC, case.target_M, support)[1].sum(), hidden_MC
    )
    _, entropy_M = support_logprob(hidden_MC, case.weight_VC, case.target_M, support)
    entropy_M.mul_(1.0).add_(3.0)
    assert torch.equal(torch.autograd.grad(entropy_M.sum(), hidden_MC)[0], expected[0])


def test_twice_the_same_bits():
    case = make_case(300, 16, 400).to(torch.float32)
    support = make_support(case.target_M, 400)
    first, second = (run_support(case, support, 500).named() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_operation_returns_all_logits_or_the_rows_of_all_pairs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Never [M, V] or [J, C]: at most one vector of pairs, a few pieces or tiles, or something of an input's size
    (slime#2253, NeMo-RL#4222). Wide rows are cut too: one of them has all V tokens."""
    M, C, V = 700, 32, 3000
    monkeypatch.setattr(kept_pairs, "CPU_PIECE_BYTES", 256 * C * 4)
    monkeypatch.setattr(tiling, "CPU_TILE_ROWS", 64)
    monkeypatch.setattr(tiling, "CPU_TILE_BYTES", 64 * 128 * 4)
    case = make_case(M, C, V, temperature=0.7, bias=True).to(dtype)
    narrow = make_support(case.target_M[1:], V, most=40)
    support = SampledSupport.concatenate([whole_vocabulary(1, V), narrow])
    J = support.token_ids.size
    hidden_MC, weight_VC = case.hidden_MC.requires_grad_(), case.weight_VC.requires_grad_()
    with LargestResult() as largest:
        logprobs_M, entropy_M = support_logprob(
            hidden_MC, weight_VC, case.target_M, support, bias=case.bias_V, **case.options
        )
        (logprobs_M + entropy_M).sum().backward()
    bytes_bound = max(8 * J, 2 * kept_pairs.CPU_PIECE_BYTES, 3 * tiling.CPU_TILE_BYTES, V * C * 4)
    assert largest.numel * 4 <= bytes_bound
    assert largest.numel < min(M * V, J * C) / 4


def test_forward_keeps_three_numbers_a_row():
    """Beside the inputs and the sets, nothing but [M] waits for backward (NeMo-RL#4222)."""
    case = make_case(50, 8, 3000, bias=True).to(torch.float32)
    support = make_support(case.target_M, 3000, most=30)
    inputs = [case.hidden_MC.requires_grad_(), case.weight_VC.requires_grad_(), case.bias_V, case.target_M]
    known = {x.data_ptr() for x in inputs if x is not None}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        support_logprob(case.hidden_MC, case.weight_VC, case.target_M, support, bias=case.bias_V)
    assert kept == [50, 50, 50]


PEAK_PROGRAM = """
import sys
import numpy as np
import torch
from ratoon.ops import support_logprob
from ratoon.ops.logprob import support as module
from ratoon.types import SampledSupport

def status_bytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024

def run(M, C, V):
    support = SampledSupport(np.arange(M + 1) * V, np.tile(np.arange(V, dtype=np.int32), M))
    hidden_MC, weight_VC = torch.randn(M, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    before_bytes = status_bytes("VmRSS")
    logprobs_M, entropy_M = support_logprob(hidden_MC, weight_VC, torch.randint(0, V, (M,)), support)
    (logprobs_M + 0.01 * entropy_M).sum().backward()
    return status_bytes("VmHWM") - before_bytes

torch.set_num_threads(1)
module.CPU_WIDE_SHARE = float(sys.argv[1])
run(8, 8, 8)  # the libraries' own buffers are not the operation's
print(run(1000, 16, 4000))
"""


def peak_bytes(share: str) -> int:
    """Memory of the operation, in a process of its own."""
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM, share],
        env={"PYTHONPATH": str(root / "src"), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return int(process.stdout)


@needs_proc
def test_peak_memory_of_a_flat_distribution(way: str):
    """4,000,000 pairs: 64 bytes each, or 32 and a few tiles of 512 x 4,000 logits."""
    share, bound_bytes = {"pairs": ("inf", 64 * 4_000_000 + 12 * MIB), "tiles": ("0", 32 * 4_000_000 + 128 * MIB)}[way]
    # Library pages that the machine took away before, and that come back meanwhile, count too: noise only adds.
    assert any(peak_bytes(share) < bound_bytes for _ in range(3))


def test_what_does_not_fit_is_refused():
    case = make_case(3, 4, 11)
    hidden_MC, weight_VC, target_M = case.hidden_MC, case.weight_VC, case.target_M
    good = make_support(target_M, 11)
    with pytest.raises(ValueError, match=r"support must be of M=3 tokens, one set a row, got 2"):
        support_logprob(hidden_MC, weight_VC, target_M, make_support(target_M[:2], 11))
    with pytest.raises(ValueError, match=r"support holds token id 11, but the weight has V=11 rows"):
        support_logprob(hidden_MC, weight_VC, target_M, make_support(torch.tensor([1, 11, 2]), 11, most=1))
    other = (target_M + 1) % 11
    alone = SampledSupport(np.arange(4), np.array([other[0], target_M[1], other[2]]))
    with pytest.raises(ValueError, match=rf"the target of row 0, {int(target_M[0])}, is not among its kept tokens"):
        support_logprob(hidden_MC, weight_VC, target_M, alone)
    with pytest.raises(ValueError, match="support_logprob: temperature must be finite"):
        support_logprob(hidden_MC, weight_VC, target_M, good, temperature=0.0)
    with pytest.raises(ValueError, match=r"support_logprob: weight must be \[V, C\]"):
        support_logprob(hidden_MC, weight_VC[:, :3], target_M, good)
    logprobs_M, _ = support_logprob(hidden_MC.requires_grad_(), weight_VC, target_M, good)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(logprobs_M.sum(), hidden_MC, create_graph=True)
