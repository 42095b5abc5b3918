"""The gap between trainer and engine: measured before it is corrected, and corrected with finite factors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import AlgorithmConfig, Correction, mismatch_correction, mismatch_sums

token = st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.sampled_from([0.0, 0.25]))  # old, rollout, weight
sequences = st.lists(st.lists(token, max_size=5), max_size=5)
Sequences = list[list[tuple[float, float, float]]]

CASES: dict[str, dict[str, Any]] = {
    "token-tis": {},
    "masked-is": {},
    "icepop": {"mismatch_max_ratio": 1.5},
    "sequence-tis": {},
    "sequence-masked-is": {},
    "sequence-tis, geometric-mean": {"mismatch_sequence_ratio": "geometric-mean"},
    "sequence-masked-is, geometric-mean": {"mismatch_sequence_ratio": "geometric-mean"},
}


def config_of(case: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"mismatch_correction": case.split(",")[0], **CASES[case]})


def correct(config: AlgorithmConfig, given: Sequences, dtype: torch.dtype = torch.float64) -> Correction:
    rows = [(*entry, float(n)) for n, tokens in enumerate(given) for entry in tokens]
    old_M, rollout_M, weights_M, sequence_of_M = torch.tensor(rows, dtype=dtype).reshape(len(rows), 4).unbind(1)
    return mismatch_correction(config, old_M, rollout_M, weights_M, sequence_of_M.int(), num_sequences=len(given))


def oracle(config: AlgorithmConfig, given: Sequences) -> tuple[list[float], int]:
    """Factors of every token, and how many were cut or masked, one response at a time."""
    factors, num_corrected = [], 0
    assert config.mismatch_max_ratio is not None
    for tokens in given:
        kept = [math.exp(old - rollout) for old, rollout, weight in tokens if weight]
        whole = math.prod(kept)
        if config.mismatch_sequence_ratio == "geometric-mean" and kept:
            whole = whole ** (1 / len(kept))
        for old, rollout, weight in tokens:
            if not weight:
                factors.append(1.0)
                continue
            ratio = whole if config.mismatch_sequence_ratio else math.exp(old - rollout)
            is_out = ratio > config.mismatch_max_ratio or ratio < (config.mismatch_min_ratio or 0.0)
            num_corrected += is_out
            at_bound = config.mismatch_max_ratio if config.mismatch_correction.endswith("tis") else 0.0
            factors.append(at_bound if is_out else ratio)
    return factors, num_corrected


@pytest.mark.parametrize("case", CASES)
@given(given=sequences)
def test_factors_match_the_definition(case: str, given: Sequences):
    """The corrections of TRL#3867 and verl#3694, and the others."""
    config = config_of(case)
    found = correct(config, given)
    factors, num_corrected = oracle(config, given)
    assert found.factor_M.tolist() == pytest.approx(factors, rel=1e-9, abs=1e-15)
    assert int(found.num_corrected) == num_corrected
    weights = [weight for tokens in given for _, _, weight in tokens]
    assert float(found.sum_factor) == pytest.approx(
        sum(factor for factor, weight in zip(factors, weights, strict=True) if weight), rel=1e-9, abs=1e-15
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [-math.inf, -1e30, -1e4, -89.0, 89.0, 1e4, 1e30, math.inf])
def test_every_factor_is_finite_whatever_the_gap(case: str, dtype: torch.dtype, gap: float):
    """Covers TRL#4772 (a sequence's ratio overflows and is masked to 0 · inf)."""
    config = config_of(case)
    found = correct(config, [[(-1.0, -1.0 - gap, 0.5), (-1.0, -1.0, 0.5)], [(-1.0, -1.0, 0.5)]], dtype)
    assert torch.isfinite(found.factor_M).all()
    assert float(found.factor_M.min()) >= 0
    assert float(found.factor_M.max()) <= (config.mismatch_max_ratio or 0)
    assert float(found.factor_M[2]) == 1.0, "the other response notices nothing"


def test_a_long_response_of_huge_gaps_is_finite():
    """TRL#4772: 4,096 tokens of one nat each, in either direction."""
    for sign in (-1.0, 1.0):
        given = [[(-1.0, -1.0 - sign, 1.0)] * 4096]
        for kind in ("sequence-tis", "sequence-masked-is"):
            found = correct(config_of(kind), given, torch.float32)
            assert torch.isfinite(found.factor_M).all()
            wanted = 0.0 if sign < 0 or kind == "sequence-masked-is" else 2.0
            assert found.factor_M.unique().tolist() == [wanted]


def test_the_product_takes_weight_from_long_responses_and_the_geometric_mean_does_not():
    """Covers TRL#5814, TRL#5815, NeMo-RL#2269: tokens whose ratios average 1 exactly, in responses of 16 and 1,024.

    The product is the exact importance ratio, of mean 1 at any length; once it is cut at 2, little of a long response's
    is left. The log says so: `correction_mean`.
    """
    rng = np.random.default_rng(0)
    sigma = 0.2

    def mean_factor(length: int, ratio: str) -> float:
        # log ratio ~ N(-sigma²/2, sigma²), whose exponential has mean 1
        gaps = rng.normal(-(sigma**2) / 2, sigma, (300, length))
        given = [[(gap, 0.0, 1.0) for gap in row] for row in gaps.tolist()]
        config = AlgorithmConfig.model_validate(
            {"mismatch_correction": "sequence-tis", "mismatch_sequence_ratio": ratio}
        )
        found = correct(config, given)
        return float(found.sum_factor) / found.factor_M.numel()

    assert mean_factor(16, "product") > 0.8
    assert mean_factor(1_024, "product") < 0.1
    assert mean_factor(16, "geometric-mean") == pytest.approx(0.98, abs=0.01)
    assert mean_factor(1_024, "geometric-mean") == pytest.approx(0.98, abs=0.01)


@given(given=sequences)
def test_the_gap_is_measured_before_any_bound(given: Sequences):
    """Covers TRL#5231 (ratios logged after truncation hide the drift)."""
    rows = [entry for tokens in given for entry in tokens]
    old_M, rollout_M, weights_M = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 3).unbind(1)
    sums = mismatch_sums(old_M, rollout_M, weights_M)
    gaps = [old - rollout for old, rollout, weight in rows if weight]
    assert int(sums.num_tokens) == len(gaps)
    assert float(sums.sum_abs) == pytest.approx(sum(map(abs, gaps)))
    assert float(sums.max_abs) == pytest.approx(max(map(abs, gaps), default=0.0))
    assert float(sums.sum_ratio) == pytest.approx(sum(map(math.exp, gaps)))
    assert float(sums.max_ratio) == pytest.approx(max(map(math.exp, gaps), default=0.0))
    wanted = sum(math.exp(gap) - 1 - gap for gap in gaps)
    assert float(sums.sum_kl_k3) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("gap", [-math.inf, -1e30, 89.0, math.inf])
def test_measures_of_a_huge_gap_are_finite_but_for_the_gap(gap: float):
    sums = mismatch_sums(torch.tensor([-1.0]), torch.tensor([-1.0 - gap]), torch.ones(1))
    assert all(math.isfinite(float(value)) for value in (sums.sum_ratio, sums.max_ratio, sums.sum_kl_k3))
    assert float(sums.max_abs) == pytest.approx(abs(gap))


@pytest.mark.parametrize("case", CASES)
def test_masked_tokens_are_never_looked_at(case: str):
    nan = math.nan
    given = [[(-1.0, -1.1, 0.5), (nan, nan, 0.0), (-math.inf, 0.0, 0.0)], [(nan, nan, 0.0)]]
    found = correct(config_of(case), given)
    assert found.factor_M.tolist() == pytest.approx([math.exp(0.1), 1.0, 1.0, 1.0])
    sums = mismatch_sums(torch.tensor([-1.0, nan]), torch.tensor([-1.1, nan]), torch.tensor([0.5, 0.0]))
    assert int(sums.num_tokens) == 1 and float(sums.sum_abs) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_no_scored_tokens(case: str):
    for num_responses in (0, 2):
        found = correct(config_of(case), [[] for _ in range(num_responses)])
        assert found.factor_M.shape == (0,) and float(found.sum_factor) == float(found.num_corrected) == 0
    none_M = torch.zeros(0)
    assert float(mismatch_sums(none_M, none_M, none_M).max_abs) == 0


def test_corrections_hold_no_graph():
    old_M, rollout_M = (torch.rand(3, requires_grad=True) for _ in range(2))
    found = mismatch_correction(
        config_of("icepop"), old_M, rollout_M, torch.ones(3), torch.zeros(3, dtype=torch.int32), num_sequences=1
    )
    assert not found.factor_M.requires_grad
    assert not mismatch_sums(old_M, rollout_M, torch.ones(3)).sum_abs.requires_grad
