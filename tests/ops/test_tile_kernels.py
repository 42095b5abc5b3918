"""The kernels of `linear_logprob`: under Triton's interpreter on a CPU, as compiled on a GPU.

Shapes are tiny, because the interpreter runs one program at a time; several blocks and tiles still lie in each.
"""

# Shape letters: M scored tokens, C channels, V vocabulary; m, v: one tile of M and of V.

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.ops.eager_logprob import Case, Outcome, assert_close, largest_error, make_case, run_eager, run_ours
from torch import Tensor

from ratoon.ops import linear_logprob
from ratoon.ops.logprob import projection, tile_kernels, tiling
from ratoon.ops.logprob.gradients import RowGrads
from ratoon.ops.logprob.kept_sets import KeptSets, KeptTiles
from ratoon.ops.logprob.projection import ProductTile, Projection
from ratoon.ops.logprob.scoring import RunningSums, SoftmaxStats, score
from ratoon.ops.logprob.transform import LogitTransform
from ratoon.types import SampledSupport

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"logit_softcap": 3.0},
    {"temperature": 1.3, "bias": True, "logit_scale": 1 / 6, "logit_softcap": 2.0},
    {"temperature": 0.2, "bias": True, "logit_scale": -1.5},
]


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    """torch.empty returns NaN, so that a tile read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def use_kernels(patch: pytest.MonkeyPatch, rows: int, columns: int, block: int = 16) -> None:
    """Tiles of so many rows and columns, and their kernels also on the CPU."""
    patch.setattr(projection, "has_tile_kernels", lambda _, accumulate_dtype: accumulate_dtype == torch.float32)
    patch.setattr(tile_kernels, "BLOCK_COLUMNS", block)
    for device in ("CPU", "CUDA"):
        patch.setattr(tiling, f"{device}_TILE_ROWS", rows)
        patch.setattr(tiling, f"{device}_TILE_BYTES", 4 * rows * columns)
    patch.setattr(tiling, "MIN_TILE_COLUMNS", 1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, 5, 37)


def run(case: Case) -> Outcome:
    return run_ours(case.to(DEVICE))


def assert_within_budget(case: Case, dtype: torch.dtype) -> None:
    """Twice eager's error against fp64 on the same rounded inputs, plus a rounding of the result, or of 1."""
    rounded = case.to(dtype).to(DEVICE)
    exact = run_eager(rounded.to(torch.float64)).named()
    eager, ours = run_eager(rounded).named(), run_ours(rounded).named()
    band = max(torch.finfo(dtype).eps / 2, 8 * 2.0**-24)
    for name, value in exact.items():
        budget = 2 * largest_error(eager[name], value) + band * max(1.0, float(value.abs().max()))
        assert largest_error(ours[name], value) <= budget, name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 5, 7), (1, 4, 37), (11, 7, 101)])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_accurate_as_eager(options: dict[str, Any], shape: tuple[int, int, int]):
    """Fewer than a block, exactly a tile, and tiles that divide neither M nor V."""
    assert_within_budget(make_case(*shape, **options), torch.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, OPTIONS[-1]])
def test_float16_is_as_accurate_as_eager(options: dict[str, Any]):
    assert_within_budget(make_case(11, 7, 101, **options), torch.float16)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", OPTIONS)
def test_one_token_vocabulary(options: dict[str, Any]):
    """Nothing to choose: all zeros, but for the last bit."""
    for name, value in run(make_case(3, 5, 1, **options).to(torch.float32)).named().items():
        assert value.abs().max() < 2.0**-20, name


@hypothesis_settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 50)),
    tile=st.tuples(st.integers(1, 6), st.integers(1, 60)),
    temperature=st.floats(0.1, 5.0),
    logit_scale=st.floats(-2.0, 2.0),
    logit_softcap=st.one_of(st.none(), st.floats(0.5, 50.0)),
    bias=st.booleans(),
    spread=st.floats(0.0, 5.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_tile_and_option(sizes: tuple[int, int, int], tile: tuple[int, int], **options: Any):
    case = make_case(*sizes, **options).to(torch.float32).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        use_kernels(patch, *tile)
        ours = run_ours(case)
    # fp32 logits of some hundreds, in worst cases, are off by 1e-5.
    assert_close(ours, run_eager(case.to(torch.float64)), rtol=2e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_loss_may_use_one_result_only(used: int, logit_softcap: float | None):
    """A plain sum: its gradient is a single number that stands for all rows."""
    case = make_case(6, 5, 43, logit_softcap=logit_softcap)
    assert_same_as_torch_path(case, lambda scores: scores[used].sum())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_input_can_be_the_only_one_trained(needed: tuple[bool, bool, bool]):
    case = make_case(6, 5, 43, bias=True)
    assert_same_as_torch_path(case, lambda scores: (scores[0] - 2.0 * scores[1]).square().sum(), needed)


def assert_same_as_torch_path(case: Case, loss: Any, needed: tuple[bool, bool, bool] = (True, True, False)) -> None:
    grads = []
    for has_kernels in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(projection, "has_tile_kernels", lambda *_, answer=has_kernels: answer)
            moved = case.to(torch.float32).to(DEVICE)
            tensors = (moved.hidden_MC, moved.weight_VC, moved.bias_V)
            inputs = [None if x is None else x.clone().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]
            assert inputs[0] is not None
            assert inputs[1] is not None
            loss(linear_logprob(inputs[0], inputs[1], moved.target_M, bias=inputs[2], **case.options)).backward()
            grads.append([None if x is None else x.grad for x in inputs])
    for fused, expected in zip(*grads, strict=True):
        assert (fused is None) == (expected is None)
        if fused is not None:
            torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_masked_tokens_are_as_if_absent():
    """A bias of -inf, on the whole of the first tile and block too: no 0 * -inf, exactly no gradient."""
    case = make_case(6, 5, 83, bias=True)
    kept = torch.tensor([40, 47, 59, 60, 73, 77, 80])
    assert case.bias_V is not None
    bias_V = torch.full_like(case.bias_V, -math.inf)
    bias_V[kept] = case.bias_V[kept]
    place_M = torch.tensor([0, 6, 3, 3, 1, 2])
    ours = run(replace(case, bias_V=bias_V, target_M=kept[place_M]).to(torch.float32))
    smaller = replace(case, weight_VC=case.weight_VC[kept], bias_V=case.bias_V[kept], target_M=place_M)
    exact = run_eager(smaller.to(torch.float32).to(torch.float64).to(DEVICE))
    masked = torch.ones(83, dtype=torch.bool).index_fill(0, kept, False)
    assert (ours.grad_weight_VC[masked] == 0).all()
    assert ours.grad_bias_V is not None
    assert (ours.grad_bias_V[masked] == 0).all()
    assert_close(
        replace(ours, grad_weight_VC=ours.grad_weight_VC[kept], grad_bias_V=ours.grad_bias_V[kept]), exact, rtol=1e-5
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_common_offset_of_the_logits(offset: float):
    """It costs no more digits than in eager's subtraction."""
    case = make_case(7, 16, 101, bias=True)
    assert case.bias_V is not None
    assert_within_budget(replace(case, bias_V=case.bias_V + offset), torch.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0}, {"logit_softcap": 1e6, "temperature": 1e-6}])
def test_extreme_logits(options: dict[str, Any]):
    """Thousands apart, or stretched by the last option's 1e12: nothing infinite, nothing on the wrong side of 0."""
    ours = run(make_case(9, 8, 101, spread=2000.0, **options).to(torch.float32))
    assert (ours.logprobs_M <= 0).all()
    assert (ours.entropy_M >= 0).all()
    for name, value in ours.named().items():
        assert value.isfinite().all(), name


@pytest.mark.usefixtures("kernels")
def test_broken_row_is_nan_alone():
    """NaN and infinity in one entry of a row's logits reach its results, through the dropping of what is negligible."""
    case = make_case(4, 5, 61, bias=False).to(torch.float32)
    case.hidden_MC[1, 2] = math.nan
    case.hidden_MC[3, 2] = math.inf
    ours = run(case)
    for value in (ours.logprobs_M, ours.entropy_M, ours.grad_hidden_MC.sum(dim=1)):
        assert value.isnan().tolist() == [False, True, False, True]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("target", [-100, -1, 61, 10**9])
def test_target_outside_the_vocabulary_is_nan(target: int):
    case = make_case(4, 5, 61, logit_softcap=4.0).to(torch.float32).to(DEVICE)
    case.target_M[2] = target
    transform = LogitTransform(temperature=1.0, logit_scale=1.0, softcap=4.0)
    scores = score(Projection.build(case.hidden_MC, case.weight_VC, None, case.target_M, transform, None))
    assert scores.logprobs_M.isnan().tolist() == [False, False, True, False]
    assert scores.entropy_M.isfinite().all()


@pytest.mark.usefixtures("kernels")
def test_strided_targets_and_bias():
    """The kernels take them as contiguous, so they are made so."""
    case = make_case(6, 5, 43, bias=True).to(torch.float32).to(DEVICE)
    assert case.bias_V is not None
    target_M = torch.stack([case.target_M, 0 * case.target_M], dim=1)[:, 0]
    bias_V = torch.stack([case.bias_V, 0 * case.bias_V], dim=1)[:, 0]
    plain, strided = (
        linear_logprob(case.hidden_MC, case.weight_VC, targets, bias=bias)
        for targets, bias in ((case.target_M, case.bias_V), (target_M, bias_V))
    )
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(plain[1], strided[1])


@pytest.mark.usefixtures("kernels")
def test_repeated_calls_are_bitwise_equal():
    case = make_case(12, 6, 101, bias=True, logit_softcap=5.0).to(torch.float32)
    first, second = run(case).named(), run(case).named()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 101])
def test_rows_of_tiles_start_aligned(columns: int):
    """An odd vocabulary does not cost the kernels and products their wide loads."""
    buffer = torch.empty(7 * tiling.padded(columns), dtype=torch.float16)
    tile_mv = projection.padded_tile_of(buffer, (3, 10), (5, 5 + columns))
    assert tile_mv.shape == (7, columns)
    assert tile_mv.stride(1) == 1
    assert tile_mv.stride(0) * tile_mv.itemsize % tiling.CUDA_ROW_BYTES == 0


@given(total=st.integers(0, 200_000), most=st.integers(1, 20_000), step=st.integers(1, 5000))
def test_pieces_are_even(total: int, most: int, step: int):
    """As few as fit, none too large, and multiples of a step where they are cut at all."""
    piece = tiling.even_piece(total, most, step)
    assert 1 <= piece <= most
    if total <= most:
        assert piece == max(1, total)
    elif step <= most:
        assert piece % step == 0
        assert -(-total // piece) == -(-total // (most - most % step))


def test_tiles_of_kept_sets_do_not_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch):
    """The kernels know nothing of what is left out."""
    use_kernels(monkeypatch, 5, 37)
    case = make_case(2, 5, 23).to(torch.float32)
    support = SampledSupport.of([np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)])
    kept = KeptTiles.build(KeptSets.build(support, torch.device("cpu")), support, 23)
    transform = LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)

    def uses_kernels(case: Case, kept: KeptTiles | None) -> bool:
        return Projection.build(case.hidden_MC, case.weight_VC, None, case.target_M, transform, kept).uses_kernels

    assert not uses_kernels(case, kept)
    assert uses_kernels(case, None)
    assert not uses_kernels(case.to(torch.float64), None)


def make_tile(m: int, v: int, *, first_column: int, softcap: float | None) -> ProductTile:
    generator = torch.Generator().manual_seed(0)
    return ProductTile(
        product_mv=(2.0 * torch.randn(m, tiling.padded(v), generator=generator)).to(DEVICE)[:, :v],
        bias_v=torch.randn(v, generator=generator).to(DEVICE),
        target_m=torch.randint(first_column - v, first_column + 2 * v, (m,), generator=generator).to(DEVICE),
        first_column=first_column,
        transform=LogitTransform(temperature=0.7, logit_scale=1.0, softcap=softcap),
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_low_precision_gradient_is_the_wide_one_rounded(softcap: float | None):
    """Written beside the logits, which stay; over them where the dtype is theirs. Padding is not touched."""
    m, v = 5, 37
    tile = make_tile(m, v, first_column=50, softcap=softcap)
    row_M = torch.linspace(0.5, 1.5, m, device=DEVICE)
    softmax = SoftmaxStats(max_M=row_M + 5.0, exp_sum_M=row_M * 9.0, mean_bits_M=-2.0 * row_M)
    row_grads = RowGrads.build(softmax, row_M - 1.1, 0.3 * row_M)
    before_mv = tile.product_mv.clone()
    narrow_buffer = torch.full((m, 64), 7.0, dtype=torch.float16, device=DEVICE)
    tile_kernels.write_logit_grads(tile, row_grads, narrow_buffer[:, :v])
    assert torch.equal(tile.product_mv, before_mv)
    assert (narrow_buffer[:, v:] == 7.0).all()
    tile_kernels.write_logit_grads(tile, row_grads, tile.product_mv)
    torch.testing.assert_close(narrow_buffer[:, :v].float(), tile.product_mv, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_sums_are_those_of_the_torch_path(softcap: float | None):
    """A second tile on top of a first: every one of the four sums, and the targets that lie elsewhere."""
    m, v = 6, 37
    tiles = [make_tile(m, v, first_column=first, softcap=softcap) for first in (0, v)]
    fused, plain = (empty_sums(m, tiles[0].transform) for _ in range(2))
    for tile in tiles:
        tile_kernels.add_to_sums_(fused, tile)
        assert tile.bias_v is not None
        y_mv = tile.product_mv + tile.bias_v
        if softcap is not None:
            y_mv = y_mv.tanh()
        column_m = tile.target_m - tile.first_column
        inside_m = (column_m >= 0) & (column_m < v)
        plain.add_tile(y_mv, torch.empty_like(y_mv), inside_m, column_m.clamp(0, v - 1).unsqueeze(1))
    for name in ("max_M", "exp_sum_M", "weighted_sum_M", "target_M"):
        got, expected = getattr(fused, name), getattr(plain, name)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
    assert 0 < int(fused.target_M.isnan().sum()) < m


def empty_sums(m: int, transform: LogitTransform) -> RunningSums:
    values: list[Tensor] = [torch.full((m,), x, device=DEVICE) for x in (-1e30, 0.0, 0.0, math.nan)]
    return RunningSums(transform, *values)


@triton.jit
def tanh_kernel(x_ptr, out_ptr):
    offs_n = tl.arange(0, 4096)
    tl.store(out_ptr + offs_n, tile_kernels._tanh(tl.load(x_ptr + offs_n)))


def test_tanh_is_relatively_accurate():
    """From far below the smallest cap's logits to saturation, both signs, within four roundings."""
    size = torch.logspace(-12, 2, 2044, dtype=torch.float64)
    edges = torch.tensor([0.0, 0.6, math.inf, math.nan], dtype=torch.float64)
    x = torch.cat([size, edges, -size, -edges]).to(torch.float32).to(DEVICE)
    got = torch.empty_like(x)
    tanh_kernel[(1,)](x, got)
    exact = x.double().tanh()
    assert torch.equal(got.isnan(), exact.isnan())
    torch.testing.assert_close(got.double(), exact, rtol=4 * 2.0**-23, atol=0, equal_nan=True)


def test_without_triton_the_cpu_path_runs():
    """The kernels are imported where they are launched."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from ratoon.ops import linear_logprob\n"
        "linear_logprob(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4]))"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0
