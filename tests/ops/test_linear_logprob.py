"""`linear_logprob`: values and gradients against the naive formula in float64, and its refusals."""

# Shape letters: M scored tokens, C channels, V vocabulary.

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.eager_logprob import Case, assert_close, eager_logits, eager_scores, largest_error, make_case, run_eager
from tests.ops.eager_logprob import run_ours as run_ours_once
from torch import Tensor

from ratoon.ops import linear_logprob
from ratoon.ops.logprob import tiling
from ratoon.ops.logprob.checks import MIN_TEMPERATURE
from ratoon.ops.logprob.projection import drop_negligible_

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"bias": True},
    {"logit_scale": 0.0625},
    {"logit_softcap": 3.0},
    {"temperature": 1.3, "bias": True, "logit_scale": 1 / 6, "logit_softcap": 2.0},
    {"temperature": 0.2, "bias": True, "logit_scale": -1.5},
]


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    """torch.empty returns NaN, so that a tile read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def set_tile(patch: pytest.MonkeyPatch, rows: int, columns: int, itemsize: int = 8) -> None:
    patch.setattr(tiling, "CPU_TILE_ROWS", rows)
    patch.setattr(tiling, "CPU_TILE_BYTES", rows * columns * itemsize)
    patch.setattr(tiling, "MIN_TILE_COLUMNS", 1)


def run_ours(case: Case, tile: tuple[int, int] | None = None):
    """With tiles of the given rows and columns (fp64), or the usual ones."""
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            set_tile(patch, *tile, itemsize=max(4, case.hidden_MC.dtype.itemsize))
        return run_ours_once(case)


@pytest.mark.parametrize("tile", [None, (3, 5), (4, 1000), (1000, 16)])
@pytest.mark.parametrize("options", OPTIONS)
def test_float64_equals_the_formula(options: dict[str, Any], tile: tuple[int, int] | None):
    """Also where neither M nor V is a multiple of the tile."""
    case = make_case(13, 7, 61, **options)
    assert_close(run_ours(case, tile), run_eager(case), rtol=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_float32_is_as_accurate_as_eager_float32(options: dict[str, Any]):
    """Error budget: twice eager's error against fp64, plus a few roundings."""
    case = make_case(67, 33, 1031, **options)
    assert_within_budget(case, torch.float32, tile=(16, 128), band=8 * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_low_precision_is_as_accurate_as_eager(options: dict[str, Any], dtype: torch.dtype):
    """Error budget: twice eager's error against fp64 on the same rounded inputs, plus one rounding of the result."""
    case = make_case(67, 33, 1031, **options)
    assert_within_budget(case, dtype, tile=(16, 128), band=torch.finfo(dtype).eps / 2)


def assert_within_budget(case: Case, dtype: torch.dtype, *, tile: tuple[int, int] | None, band: float) -> None:
    rounded = case.to(dtype)
    exact = run_eager(rounded.to(torch.float64)).named()
    eager, ours = run_eager(rounded).named(), run_ours(rounded, tile).named()
    for name, value in exact.items():
        result_dtype = torch.float32 if name in ("logprobs_M", "entropy_M") else dtype
        assert ours[name].dtype == result_dtype
        budget = 2 * largest_error(eager[name], value) + band * float(value.abs().max())
        assert largest_error(ours[name], value) <= budget, name


def test_low_precision_logits_are_not_rounded():
    """bf16 inputs, fp32 logits: log-probs are far closer to fp64 than bf16 logits could be."""
    rounded = make_case(64, 32, 1024).to(torch.bfloat16)
    exact = run_eager(rounded.to(torch.float64))
    assert largest_error(run_ours(rounded).logprobs_M, exact.logprobs_M) < 1e-5
    assert largest_error(run_eager(rounded).logprobs_M, exact.logprobs_M) > 1e-3


def test_low_precision_weight_gradient_is_summed_wide():
    """Many rows add up in fp32 and are rounded once, whatever the tiles."""
    case = make_case(1500, 8, 5).to(torch.bfloat16)
    exact = run_eager(case.to(torch.float64)).grad_weight_VC
    got = run_ours(case, tile=(4, 2)).grad_weight_VC
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 40)),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 45)),
    temperature=st.floats(0.1, 5.0),
    logit_scale=st.floats(-2.0, 2.0),
    logit_softcap=st.one_of(st.none(), st.floats(0.5, 50.0)),
    bias=st.booleans(),
    spread=st.floats(0.0, 30.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_tile_and_option(sizes: tuple[int, int, int], tile: tuple[int, int], **options: Any):
    case = make_case(*sizes, **options)
    assert_close(run_ours(case, tile), run_eager(case), rtol=1e-11)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, Any]):
    """Both results, by finite differences."""
    case = make_case(5, 4, 11, spread=1.0, **options)
    inputs = [x.requires_grad_() for x in (case.hidden_MC, case.weight_VC, case.bias_V) if x is not None]

    def score(hidden_MC: Tensor, weight_VC: Tensor, bias_V: Tensor | None = None):
        return linear_logprob(hidden_MC, weight_VC, case.target_M, bias=bias_V, **case.options)

    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, 2, 3)
        assert torch.autograd.gradcheck(score, inputs)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_loss_may_use_one_result_only(used: int, logit_softcap: float | None):
    case = make_case(6, 5, 23, logit_softcap=logit_softcap)
    ours, exact = (
        torch.autograd.grad(score[used].sum(), inputs)
        for inputs, score in (
            differentiable(case, lambda h, w: linear_logprob(h, w, case.target_M, logit_softcap=logit_softcap)),
            differentiable(
                case, lambda h, w: eager_scores(eager_logits(h, w, None, logit_softcap=logit_softcap), case.target_M)
            ),
        )
    )
    for got, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def differentiable(case: Case, score: Any) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    inputs = [case.hidden_MC.clone().requires_grad_(), case.weight_VC.clone().requires_grad_()]
    return inputs, score(*inputs)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_input_can_be_the_only_one_trained(needed: tuple[bool, bool, bool]):
    case = make_case(6, 5, 23, bias=True)
    expected = run_eager(case)
    assert case.bias_V is not None
    inputs = [
        x.clone().requires_grad_(n) for x, n in zip((case.hidden_MC, case.weight_VC, case.bias_V), needed, strict=True)
    ]
    logprobs_M, entropy_M = linear_logprob(inputs[0], inputs[1], case.target_M, bias=inputs[2])
    (case.loss_weights_2M[0] * logprobs_M + case.loss_weights_2M[1] * entropy_M).sum().backward()
    expected_grads = (expected.grad_hidden_MC, expected.grad_weight_VC, expected.grad_bias_V)
    for tensor, is_needed, grad in zip(inputs, needed, expected_grads, strict=True):
        if is_needed:
            torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=1e-12)
        else:
            assert tensor.grad is None


def test_results_can_be_scored_without_a_graph():
    """The reference and old log-probs: same numbers, nothing to differentiate."""
    case = make_case(6, 5, 23).to(torch.float32)
    weight_VC = case.weight_VC.requires_grad_()
    with_graph = linear_logprob(case.hidden_MC, weight_VC, case.target_M)
    with torch.no_grad():
        without_graph = linear_logprob(case.hidden_MC, weight_VC, case.target_M)
    for one, other in zip(with_graph, without_graph, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows(dtype: torch.dtype):
    """A microbatch without scored tokens, on a rank with nothing to do: empty results, zero gradients, no NaN."""
    case = make_case(0, 5, 23, bias=True).to(dtype)
    ours = run_ours(case)
    assert ours.logprobs_M.shape == ours.entropy_M.shape == (0,)
    assert ours.grad_hidden_MC.shape == (0, 5)
    assert torch.equal(ours.grad_weight_VC, torch.zeros(23, 5, dtype=dtype))
    assert ours.grad_bias_V is not None
    assert torch.equal(ours.grad_bias_V, torch.zeros(23, dtype=dtype))


def test_public_name_survives_import_of_its_module():
    """The package's `linear_logprob` is the function, whatever was imported before."""
    import ratoon.ops
    import ratoon.ops.logprob.entry

    assert ratoon.ops.linear_logprob is ratoon.ops.logprob.entry.linear_logprob is linear_logprob
    with pytest.raises(AttributeError, match="no attribute 'linear_logprobs'"):
        _ = ratoon.ops.linear_logprobs


def test_package_imports_no_torch():
    program = "import sys, ratoon.ops, ratoon.ops.logprob; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0


def test_one_token_vocabulary():
    """Nothing to choose: all zeros, but for the last bit."""
    for name, value in run_ours(make_case(3, 5, 1)).named().items():
        assert value.abs().max() < 1e-15, name


@pytest.mark.parametrize(
    ("shape", "make_hidden"),
    [
        ((5, 6), lambda base: base.T),
        ((6, 10), lambda base: base[:, ::2]),
        ((6, 10), lambda base: base[:, 3:8]),
        ((12, 5), lambda base: base[torch.arange(11, -1, -2)]),
        ((1, 5), lambda base: base.expand(6, 5)),
    ],
)
def test_hidden_of_any_strides(shape: tuple[int, int], make_hidden: Any):
    case = make_case(6, 5, 23)
    base = torch.randn(shape, dtype=torch.float64)
    assert_same_grads(base, lambda base: (make_hidden(base), case.weight_VC), case)


@pytest.mark.parametrize(
    ("shape", "make_weight"),
    [
        ((5, 23), lambda base: base.T),
        ((23, 10), lambda base: base[:, ::2]),
        ((46, 5), lambda base: base[::2]),
    ],
)
def test_weight_of_any_strides(shape: tuple[int, int], make_weight: Any):
    case = make_case(6, 5, 23)
    base = torch.randn(shape, dtype=torch.float64)
    assert_same_grads(base, lambda base: (case.hidden_MC, make_weight(base)), case)


def eager_score(hidden_MC: Tensor, weight_VC: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
    return eager_scores(hidden_MC @ weight_VC.T, target_M)


def assert_same_grads(base: Tensor, make_inputs: Any, case: Case) -> None:
    grads = []
    scorers: list[Any] = [eager_score, linear_logprob]
    for score in scorers:
        leaf = base.clone().requires_grad_()
        logprobs_M, entropy_M = score(*make_inputs(leaf), case.target_M)
        (case.loss_weights_2M[0] * logprobs_M + case.loss_weights_2M[1] * entropy_M).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_results_may_be_changed_in_place():
    """A caller that masks or scales the vectors it got does not spoil the gradient."""
    case = make_case(6, 5, 23)
    hidden_MC = case.hidden_MC.clone().requires_grad_()
    logprobs_M, entropy_M = linear_logprob(hidden_MC, case.weight_VC, case.target_M)
    (logprobs_M.mul_(case.loss_weights_2M[0]) + entropy_M.mul_(case.loss_weights_2M[1])).sum().backward()
    torch.testing.assert_close(hidden_MC.grad, run_eager(case).grad_hidden_MC, rtol=1e-12, atol=1e-12)


def test_tied_weight_collects_both_gradients():
    """An embedding that is also the head: the op's gradient is added to the embedding's."""
    case = make_case(6, 5, 23)
    token_ids_M = torch.arange(6)
    grads = []
    scorers: list[Any] = [eager_score, linear_logprob]
    for score in scorers:
        weight_VC = case.weight_VC.clone().requires_grad_()
        logprobs_M, _ = score(weight_VC[token_ids_M].tanh(), weight_VC, case.target_M)
        logprobs_M.sum().backward()
        grads.append(weight_VC.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile", [None, (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_masked_tokens_are_as_if_absent(dtype: torch.dtype, tile: tuple[int, int] | None):
    """A bias of -inf, on the whole of the first tile too: no 0 * -inf in the entropy, exactly no gradient."""
    case = make_case(6, 5, 23, bias=True).to(dtype)
    kept = torch.tensor([6, 7, 9, 10, 13, 17, 20])
    assert case.bias_V is not None
    masked_bias_V = torch.full_like(case.bias_V, -math.inf)
    masked_bias_V[kept] = case.bias_V[kept]
    target_M = torch.tensor([0, 6, 3, 3, 1, 2])
    ours = run_ours(replace(case, bias_V=masked_bias_V, target_M=kept[target_M]), tile)
    smaller = run_eager(
        replace(case, weight_VC=case.weight_VC[kept], bias_V=case.bias_V[kept], target_M=target_M).to(torch.float64)
    )
    grad_weight_VC, grad_bias_V = torch.zeros_like(case.weight_VC).double(), torch.zeros_like(case.bias_V).double()
    assert smaller.grad_bias_V is not None
    grad_weight_VC[kept], grad_bias_V[kept] = smaller.grad_weight_VC, smaller.grad_bias_V
    exact = replace(smaller, grad_weight_VC=grad_weight_VC, grad_bias_V=grad_bias_V)
    assert_close(ours, exact, rtol=1e-12 if dtype == torch.float64 else 1e-6)
    masked = torch.ones(23, dtype=torch.bool).index_fill(0, kept, False)
    assert (ours.grad_weight_VC[masked] == 0).all()


def test_masked_target_is_impossible_and_spoils_nothing_else():
    case = make_case(2, 5, 23, bias=True)
    assert case.bias_V is not None
    case.bias_V[4] = -math.inf
    logprobs_M, entropy_M = linear_logprob(case.hidden_MC, case.weight_VC, torch.tensor([4, 5]), bias=case.bias_V)
    assert logprobs_M[0] == -math.inf
    assert logprobs_M[1].isfinite()
    assert entropy_M.isfinite().all()


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_common_offset_of_the_logits(offset: float):
    """fp32 stays within eager's budget when all logits are large and close to one another."""
    case = make_case(33, 16, 301, bias=True)
    assert case.bias_V is not None
    shifted = replace(case, bias_V=case.bias_V + offset)
    assert_within_budget(shifted, torch.float32, tile=(8, 64), band=8 * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits(dtype: torch.dtype):
    """Logits thousands apart: log-probs at most 0, entropies at least 0, nothing infinite, gradients finite."""
    ours = run_ours(make_case(40, 8, 301, spread=2000.0, temperature=0.25).to(dtype))
    assert (ours.logprobs_M <= 0).all()
    assert (ours.entropy_M >= 0).all()
    for name, value in ours.named().items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_lowest_temperature(dtype: torch.dtype):
    ours = run_ours(make_case(40, 8, 301, spread=50.0, temperature=MIN_TEMPERATURE).to(dtype))
    assert (ours.logprobs_M <= 0).all()
    for name, value in ours.named().items():
        assert value.isfinite().all(), name


def test_certain_token():
    """Probability 1, from large logits: 0 to within a rounding of 1, and never on the wrong side."""
    weight_VC = torch.tensor([[1.0], [-1.0], [0.0]])
    logprobs_M, entropy_M = linear_logprob(torch.tensor([[5e3]]), weight_VC, torch.tensor([0]))
    assert -(2.0**-23) < logprobs_M.item() <= 0
    assert 0 <= entropy_M.item() < 2.0**-23


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2.0**-64), (torch.float64, 2.0**-512)])
def test_no_subnormal_reaches_a_matrix_product(dtype: torch.dtype, bound: float):
    """CPU matrix products are some 200 times slower on subnormals; NaN and what counts are left alone."""
    bits = torch.linspace(-3000.0, 0.0, 30_001, dtype=dtype)
    kept = bits[bits.double().exp2() > bound].clone()
    dropped = drop_negligible_(bits)
    assert ((dropped.exp2() == 0) | (dropped.exp2() > bound)).all()
    assert torch.equal(dropped[-len(kept) :], kept)
    assert (dropped[: -len(kept)].exp2() * dropped[: -len(kept)] == 0).all()
    assert drop_negligible_(torch.tensor([[math.nan, -math.inf]], dtype=dtype)).isnan().tolist() == [[True, False]]


def test_overflowing_hidden_state_is_not_hidden():
    """A broken row is NaN; its neighbours are not touched."""
    case = make_case(3, 5, 23)
    case.hidden_MC[1, 2] = math.nan
    ours = run_ours(case)
    assert ours.logprobs_M.isnan().tolist() == ours.entropy_M.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_target(dtype: torch.dtype):
    case = make_case(6, 5, 23)
    narrow = replace(case, target_M=case.target_M.to(dtype))
    assert torch.equal(run_ours(narrow).logprobs_M, run_ours(case).logprobs_M)


def test_repeated_calls_are_bitwise_equal():
    case = make_case(70, 16, 301, bias=True, logit_softcap=5.0).to(torch.float32)
    first, second = run_ours(case, (32, 64)).named(), run_ours(case, (32, 64)).named()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_autocast_changes_nothing():
    case = make_case(70, 16, 301, bias=True).to(torch.float32)
    plain = run_ours(case).named()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run_ours(case).named()
    assert all(torch.equal(plain[name], cast[name]) for name in plain)


def test_second_derivative_is_refused():
    """It would be wrong in silence otherwise: backward is not itself differentiable."""
    case = make_case(3, 5, 23)
    hidden_MC = case.hidden_MC.requires_grad_()
    logprobs_M, _ = linear_logprob(hidden_MC, case.weight_VC, case.target_M)
    with pytest.raises(RuntimeError, match=r"differentiated once, got .*create_graph=True"):
        torch.autograd.grad(logprobs_M.sum(), hidden_MC, create_graph=True)


HIDDEN, WEIGHT, TARGET = torch.zeros(4, 3), torch.zeros(10, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_MC": torch.zeros(2, 4, 3)}, r"hidden must be \[M, C\].*got torch.float32 \[2, 4, 3\]; flatten"),
        ({"hidden_MC": torch.zeros(4, 3, dtype=torch.int64)}, r"hidden must be .* got torch.int64"),
        ({"weight_VC": torch.zeros(10, 2)}, r"weight must be \[V, C\].*C=3.*\[10, 2\]"),
        ({"weight_VC": torch.zeros(3)}, r"weight must be \[V, C\].*\[3\]"),
        ({"weight_VC": torch.zeros(0, 3)}, r"V >= 1.*\[0, 3\]"),
        ({"weight_VC": torch.zeros(10, 3, dtype=torch.bfloat16)}, r"weight must have hidden's dtype.*bfloat16; cast"),
        ({"weight_VC": torch.zeros(10, 3, device="meta")}, r"weight must be on hidden's device cpu, got meta"),
        ({"target_M": torch.zeros(5, dtype=torch.int64)}, r"target must be \[M=4\] integers.*\[5\]"),
        ({"target_M": torch.zeros(4, 1, dtype=torch.int64)}, r"target must be \[M=4\] integers.*\[4, 1\]"),
        ({"target_M": torch.zeros(4)}, r"target must be \[M=4\] integers.*float32"),
        ({"target_M": torch.tensor([0, 10, 3, 4])}, r"targets must be in \[0, V=10\), got values from 0 to 10"),
        ({"target_M": torch.tensor([0, -100, 3, 4])}, r"got values from -100 to 4; leave out"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V=10\].*\[3\]"),
        ({"bias": torch.zeros(10, dtype=torch.float64)}, r"bias must have hidden's dtype"),
        ({"temperature": 0.0}, r"temperature must be finite and at least 1e-06, got 0.0"),
        ({"temperature": 1e-30}, r"temperature must be finite and at least 1e-06, got 1e-30; greedy"),
        ({"temperature": -1.0}, r"temperature must be finite and at least 1e-06, got -1.0"),
        ({"temperature": math.nan}, r"temperature must be finite and at least 1e-06, got nan"),
        ({"temperature": math.inf}, r"temperature must be finite and at least 1e-06, got inf"),
        ({"logit_scale": math.inf}, r"logit_scale must be finite, got inf"),
        ({"logit_softcap": 0.0}, r"logit_softcap must be finite and above 0, got 0.0"),
        ({"logit_softcap": -30.0}, r"logit_softcap must be finite and above 0, got -30.0"),
        ({"logit_softcap": math.inf}, r"logit_softcap must be finite and above 0, got inf; None leaves it out"),
    ],
)
def test_wrong_input_is_refused(changed: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"hidden_MC": HIDDEN, "weight_VC": WEIGHT, "target_M": TARGET} | changed
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)
