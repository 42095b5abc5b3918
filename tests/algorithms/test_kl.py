"""Estimates of the KL divergence from a reference, as numbers and as gradients."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratoon.algorithms import kl_estimates, kl_loss

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")

tokens = st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0), st.sampled_from([0.0, 0.2, 0.5])), max_size=9)


def oracle(policy: float, ref: float, estimator: Estimator) -> tuple[float, float]:
    """The estimate and its derivative by the policy's log-prob: Schulman's note, with r = reference / policy."""
    r = math.exp(ref - policy)
    return {
        "k1": (policy - ref, 1.0),
        "k2": ((policy - ref) ** 2 / 2, policy - ref),
        "k3": (r - 1 - math.log(r), 1 - r),
    }[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=tokens)
def test_loss_and_gradient_match_the_definition(estimator: Estimator, rows: list[tuple[float, float, float]]):
    columns = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 3).unbind(1)
    policy_M = columns[0].clone().requires_grad_()
    result = kl_loss(policy_M, columns[1], columns[2], estimator=estimator)
    result.loss.backward()
    values = [(weight, *oracle(policy, ref, estimator)) for policy, ref, weight in rows]
    assert float(result.loss.detach()) == pytest.approx(sum(w * kl for w, kl, _ in values), rel=1e-9, abs=1e-12)
    assert float(result.sum_kl) == pytest.approx(sum(kl for w, kl, _ in values if w), rel=1e-9, abs=1e-12)
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == pytest.approx([w * grad for w, _, grad in values], rel=1e-9, abs=1e-12)
    assert not result.sum_kl.requires_grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_each_estimates_over_all_tokens(estimator: Estimator):
    """Exact means under the policy, over a vocabulary of five: k1 and k3 give KL(policy || reference). The mean
    gradient of k2 is that divergence's, k3's is KL(reference || policy)'s, and k1's is 0."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    ref_V = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    policy_V = logits_V.log_softmax(0)
    probs_V = policy_V.detach().exp()
    kl = (policy_V.exp() * (policy_V - ref_V)).sum()
    reverse = (ref_V.exp() * (ref_V - policy_V)).sum()
    estimates_V = kl_estimates(policy_V, ref_V, estimator=estimator)
    mean = (probs_V * estimates_V).sum()
    (gradient,) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    if estimator != "k2":
        assert float(mean.detach()) == pytest.approx(float(kl.detach()))
    wanted = {"k1": torch.zeros(5).double(), "k2": kl, "k3": reverse}[estimator]
    if wanted.requires_grad:
        (wanted,) = torch.autograd.grad(wanted, logits_V, retain_graph=True)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [-math.inf, -1e30, -500.0, 500.0, 1e30, math.inf])
def test_huge_gaps_are_finite_and_still_pull_back(estimator: Estimator, dtype: torch.dtype, gap: float):
    """gap > 0: the policy draws what the reference excludes; the penalty must go on pushing the log-prob down."""
    policy_M = torch.tensor([-1.0, -1.0], dtype=dtype, requires_grad=True)
    ref_M = torch.tensor([-1.0 - gap, -1.5], dtype=dtype)
    result = kl_loss(policy_M, ref_M, torch.ones(2), estimator=estimator)
    result.loss.backward()
    assert policy_M.grad is not None
    assert torch.isfinite(result.loss.detach()) and torch.isfinite(policy_M.grad).all()
    if gap == 500.0:
        assert float(policy_M.grad[0]) >= 0.99
    assert float(policy_M.grad[1]) > 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_tokens_are_never_looked_at(estimator: Estimator):
    policy_M = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    ref_M = torch.tensor([-1.0, -1.0, math.nan])
    result = kl_loss(policy_M, ref_M, torch.tensor([0.5, 0.0, 0.0]), estimator=estimator)
    result.loss.backward()
    assert policy_M.grad is not None
    assert float(result.loss.detach()) == float(result.sum_kl) == 0.0
    assert policy_M.grad[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_scored_and_nan_scored(estimator: Estimator):
    weight = torch.ones(2, requires_grad=True)
    result = kl_loss((weight * 2)[:0], torch.zeros(0), torch.zeros(0), estimator=estimator)
    result.loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]
    nan = kl_loss(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), estimator=estimator)
    assert math.isnan(float(nan.loss))


def test_the_reference_gets_no_gradient():
    policy_M, ref_M = (torch.rand(3, requires_grad=True) for _ in range(2))
    kl_loss(policy_M, ref_M, torch.ones(3), estimator="k3").loss.backward()
    assert ref_M.grad is None and policy_M.grad is not None
