"""Losses against an oracle that loops over tokens in Python floats, forward and backward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.algorithms import PolicyLoss, clipped_policy_loss, entropy_bonus, supervised_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28}

tokens = st.lists(
    st.tuples(
        st.floats(-30, 0),  # policy
        st.floats(-30, 0),  # old
        st.floats(-3, 3),  # advantage
        st.sampled_from([0.0, 0.125, 0.3]),  # weight
    ),
    max_size=13,
)


def tensors(rows: list[tuple[float, ...]], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    columns = torch.tensor(rows, dtype=dtype).reshape(len(rows), 4).unbind(1)
    return [columns[0].clone().requires_grad_(), *columns[1:]]


def oracle(rows: list[tuple[float, ...]], clip_low: float, clip_high: float) -> tuple[float, list[float]]:
    """The loss and its derivative by each policy log-prob, from the definition, case by case."""
    loss, grads = 0.0, []
    for policy, old, advantage, weight in rows:
        ratio = math.exp(max(-20.0, min(20.0, policy - old)))
        too_high = advantage > 0 and ratio > 1 + clip_high
        too_low = advantage < 0 and ratio < 1 - clip_low
        used = 1 + clip_high if too_high else 1 - clip_low if too_low else ratio
        loss -= weight * used * advantage
        has_grad = not (too_high or too_low) and abs(policy - old) <= 20.0
        grads.append(-weight * ratio * advantage if has_grad else 0.0)
    return loss, grads


@settings(max_examples=300)
@given(tokens)
def test_value_and_gradient_match_the_definition(rows: list[tuple[float, ...]]):
    policy_M, old_M, advantages_M, weights_M = tensors(rows)
    result = clipped_policy_loss(policy_M, old_M, advantages_M, weights_M, **CLIP)
    result.loss.backward()
    loss, grads = oracle(rows, **CLIP)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert policy_M.grad is not None
    torch.testing.assert_close(policy_M.grad, torch.tensor(grads, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@given(tokens)
def test_sums_for_logging_match_the_definition(rows: list[tuple[float, ...]]):
    result = clipped_policy_loss(*tensors(rows), **CLIP)
    kept = [(max(-20.0, min(20.0, policy - old)), advantage) for policy, old, advantage, weight in rows if weight]
    assert int(result.num_loss_tokens) == len(kept)
    assert int(result.num_clipped_low) == sum(math.exp(x) < 0.8 and a < 0 for x, a in kept)
    assert int(result.num_clipped_high) == sum(math.exp(x) > 1.28 and a > 0 for x, a in kept)
    assert float(result.sum_ratio) == pytest.approx(sum(math.exp(x) for x, _ in kept), rel=1e-12)
    assert float(result.sum_kl_k3) == pytest.approx(sum(math.exp(x) - 1 - x for x, _ in kept), rel=1e-9, abs=1e-12)
    drift = max((abs(policy - old) for policy, old, _, weight in rows if weight), default=0.0)
    assert float(result.max_abs_log_ratio) == pytest.approx(drift)
    for name in PolicyLoss.__slots__:
        value = getattr(result, name)
        assert value.ndim == 0
        assert value.requires_grad == (name == "loss")


def test_at_equal_weights_the_gradient_is_the_policy_gradient():
    """Ratio 1 everywhere, and a loss whose value may be 0 while its gradient is not (TRL#3452)."""
    policy_M = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    advantages_M = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    weights_M = torch.full((4,), 0.25, dtype=torch.float64)
    result = clipped_policy_loss(policy_M, policy_M, advantages_M, weights_M, **CLIP)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert float(result.sum_ratio) == 4.0
    assert float(result.sum_kl_k3) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio", [-1e30, -1e4, -89.0, 89.0, 1e4, 1e30, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float, dtype: torch.dtype):
    """Covers TRL#4772 (a sequence's ratio explodes) and TRL#5231 (logged after a cut, it would not show)."""
    policy_M = torch.tensor([0.0, -1.0], dtype=dtype) + torch.tensor([log_ratio, 0.0], dtype=dtype)
    policy_M.requires_grad_()
    old_M = torch.tensor([0.0, -1.0], dtype=dtype)
    result = clipped_policy_loss(policy_M, old_M, torch.full((2,), advantage), torch.full((2,), 0.5), **CLIP)
    result.loss.backward()
    assert policy_M.grad is not None
    assert torch.isfinite(policy_M.grad).all()
    assert float(policy_M.grad[1]) == -0.5 * advantage
    for name in ("loss", "sum_ratio", "sum_kl_k3"):
        assert math.isfinite(float(getattr(result, name).detach())), name
    # The drift itself is logged as it is, not as it was bounded (TRL#5231).
    assert float(result.max_abs_log_ratio) == pytest.approx(abs(log_ratio), rel=1e-2)


def test_a_masked_token_is_never_looked_at():
    nan = float("nan")
    policy_M = torch.tensor([-1.0, nan, -math.inf], requires_grad=True)
    old_M = torch.tensor([-1.5, -2.0, -math.inf])
    advantages_M = torch.tensor([-1.0, nan, math.inf])
    weights_M = torch.tensor([0.5, 0.0, 0.0])
    result = clipped_policy_loss(policy_M, old_M, advantages_M, weights_M, **CLIP)
    result.loss.backward()
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == [pytest.approx(0.5 * math.exp(0.5)), 0.0, 0.0]
    assert float(result.max_abs_log_ratio) == 0.5
    for loss in (entropy_bonus(policy_M, weights_M), supervised_loss(policy_M, weights_M)):
        policy_M.grad = None
        loss.backward()
        assert policy_M.grad is not None
        assert torch.isfinite(policy_M.grad).all()


def test_a_scored_nan_is_not_hidden():
    policy_M = torch.tensor([float("nan"), -1.0])
    result = clipped_policy_loss(policy_M, torch.zeros(2), torch.ones(2), torch.ones(2), **CLIP)
    assert math.isnan(float(result.loss))


def test_no_scored_tokens_still_has_a_graph():
    """A rank with nothing to do calls backward like the others (verl#5591)."""
    weight = torch.ones(3, requires_grad=True)
    policy_M = (weight * 2.0)[:0]
    none_M = torch.zeros(0)
    result = clipped_policy_loss(policy_M, none_M, none_M, none_M, **CLIP)
    assert float(result.loss.detach()) == 0.0
    for loss in (result.loss, entropy_bonus(policy_M, none_M), supervised_loss(policy_M, none_M)):
        weight.grad = None
        loss.backward(retain_graph=True)
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.0] * 3
    for name in PolicyLoss.__slots__:
        assert float(getattr(result, name).detach()) == 0.0


def test_half_precision_logprobs_are_summed_in_float32():
    policy_M = torch.full((4096,), -1.0, dtype=torch.bfloat16, requires_grad=True)
    weights_M = torch.full((4096,), 1 / 4096)
    result = clipped_policy_loss(policy_M, policy_M.detach(), torch.ones(4096), weights_M, **CLIP)
    assert result.loss.dtype == torch.float32
    assert float(result.loss.detach()) == pytest.approx(-1.0, rel=1e-6)
    assert float(supervised_loss(policy_M, weights_M).detach()) == pytest.approx(1.0, rel=1e-6)


@given(tokens, st.integers(0, 13))
def test_parts_sum_to_the_whole(rows: list[tuple[float, ...]], cut: int):
    """Sums over microbatches equal one microbatch: value, gradient and every logged sum."""
    whole_policy_M, *whole = tensors(rows)
    result = clipped_policy_loss(whole_policy_M, *whole, **CLIP)
    result.loss.backward()
    part_policy_M, *part = tensors(rows)
    parts = [
        clipped_policy_loss(part_policy_M[piece], *(column[piece] for column in part), **CLIP)
        for piece in (slice(None, cut), slice(cut, None))
    ]
    sum(piece.loss for piece in parts).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert part_policy_M.grad is not None and whole_policy_M.grad is not None
    torch.testing.assert_close(part_policy_M.grad, whole_policy_M.grad, rtol=0, atol=0)
    for name in PolicyLoss.__slots__:
        values = torch.stack([getattr(piece, name).detach() for piece in parts])
        combined = values.amax() if name == "max_abs_log_ratio" else values.sum()
        torch.testing.assert_close(combined, getattr(result, name).detach(), rtol=1e-12, atol=1e-15)


def test_gradcheck_away_from_the_kinks():
    generator = torch.Generator().manual_seed(0)
    old_M = -torch.rand(17, dtype=torch.float64, generator=generator)
    policy_M = (old_M + torch.randn(17, dtype=torch.float64, generator=generator)).requires_grad_()
    advantages_M = torch.randn(17, dtype=torch.float64, generator=generator)
    weights_M = torch.rand(17, dtype=torch.float64, generator=generator)

    def loss(policy: torch.Tensor) -> torch.Tensor:
        return clipped_policy_loss(policy, old_M, advantages_M, weights_M, **CLIP).loss

    assert torch.autograd.gradcheck(loss, (policy_M,))


def test_entropy_and_supervised_losses_by_hand():
    values_M = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    weights_M = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
    supervised = supervised_loss(values_M, weights_M)
    assert float(supervised.detach()) == 1.5
    supervised.backward()
    assert values_M.grad is not None
    assert values_M.grad.tolist() == [-0.5, 0.0, -0.25]
    assert float(entropy_bonus(-values_M.detach(), weights_M)) == 1.5


def test_advantages_and_old_logprobs_get_no_gradient():
    policy_M, old_M, advantages_M, weights_M = (torch.rand(3, requires_grad=True) for _ in range(4))
    clipped_policy_loss(policy_M, old_M, advantages_M, weights_M, **CLIP).loss.backward()
    assert policy_M.grad is not None
    assert old_M.grad is None and advantages_M.grad is None and weights_M.grad is None


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"weights of shape \(4,\) for policy_logprobs of \(3,\)"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(4), **CLIP)
