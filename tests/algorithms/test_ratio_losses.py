"""Dual clip, GSPO and CISPO against oracles that loop over single sequences in Python floats, forward and backward."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.algorithms import (
    AlgorithmConfig,
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    policy_loss,
)

token = st.tuples(
    st.floats(-9, 0),  # policy
    st.floats(-9, 0),  # old
    st.sampled_from([0.0, 0.125, 0.3]),  # weight
)
sequences = st.lists(st.tuples(st.floats(-3, 3), st.lists(token, max_size=5)), max_size=5)
"""(advantage, tokens) of each response; some without tokens, some with nothing but masked ones."""

Sequences = list[tuple[float, list[tuple[float, float, float]]]]


def config_of(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"clip_low": 0.2, "clip_high": 0.28, "num_minibatches": 2, **given})


def vectors(given: Sequences) -> tuple[torch.Tensor, ...]:
    """policy (with graph), old, advantages, weights, sequence_of: [M]."""
    rows = [
        (policy, old, advantage, weight, float(n))
        for n, (advantage, tokens) in enumerate(given)
        for policy, old, weight in tokens
    ]
    policy_M, old_M, advantages_M, weights_M, sequence_of_M = (
        torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 5).unbind(1)
    )
    return policy_M.clone().requires_grad_(), old_M, advantages_M, weights_M, sequence_of_M.int()


def run(given: Sequences, config: AlgorithmConfig) -> tuple[PolicyLoss, list[float]]:
    policy_M, *rest = vectors(given)
    result = policy_loss(config, policy_M, *rest, num_sequences=len(given))
    result.loss.backward()
    assert policy_M.grad is not None
    return result, policy_M.grad.tolist()


def clip_of(ratio: float, advantage: float, dual_clip: float | None) -> tuple[float, bool]:
    """The ratio that counts, and whether it stands at a bound."""
    if advantage > 0:
        return (1.28, True) if ratio > 1.28 else (ratio, False)
    if dual_clip is not None and advantage < 0 and ratio > dual_clip:
        return dual_clip, True
    return (0.8, True) if ratio < 0.8 and advantage < 0 else (ratio, False)


def dual_clip_oracle(given: Sequences) -> tuple[float, list[float], int]:
    loss, grads, num_clipped = 0.0, [], 0
    for advantage, tokens in given:
        for policy, old, weight in tokens:
            ratio = math.exp(policy - old)
            used, is_cut = clip_of(ratio, advantage, 3.0)
            loss -= weight * used * advantage
            grads.append(0.0 if is_cut else -weight * ratio * advantage)
            num_clipped += is_cut and weight > 0
    return loss, grads, num_clipped


def gspo_oracle(given: Sequences) -> tuple[float, list[float], int]:
    """s = exp(mean log ratio); each of its n tokens moves every token's term by s / n."""
    loss, grads, num_clipped = 0.0, [], 0
    for advantage, tokens in given:
        kept = [(policy - old, weight) for policy, old, weight in tokens if weight]
        total_weight = sum(weight for _, weight in kept)
        ratio = math.exp(sum(log_ratio for log_ratio, _ in kept) / len(kept)) if kept else 1.0
        used, is_cut = clip_of(ratio, advantage, None)
        loss -= total_weight * used * advantage
        num_clipped += is_cut * len(kept)
        for _, _, weight in tokens:
            has_gradient = weight and not is_cut
            grads.append(-total_weight * advantage * ratio / len(kept) if has_gradient else 0.0)
    return loss, grads, num_clipped


def cispo_oracle(given: Sequences, lowest: float) -> tuple[float, list[float], int]:
    loss, grads, num_clipped = 0.0, [], 0
    for advantage, tokens in given:
        for policy, old, weight in tokens:
            ratio = math.exp(policy - old)
            used = min(max(ratio, lowest), 1.28)
            loss -= weight * used * advantage * policy
            grads.append(-weight * used * advantage)
            num_clipped += used != ratio and weight > 0 and advantage != 0
    return loss, grads, num_clipped


ORACLES: dict[str, Any] = {
    "dual clip": (config_of(dual_clip=3.0), dual_clip_oracle),
    "gspo": (config_of(name="gspo"), gspo_oracle),
    "cispo": (config_of(name="cispo"), lambda given: cispo_oracle(given, 0.8)),
    "cispo, no lower bound": (
        config_of(name="cispo", clip_low=None),
        lambda given: cispo_oracle(given, 0.0),
    ),
}


@pytest.mark.parametrize("case", ORACLES)
@settings(max_examples=150)
@given(given=sequences)
def test_value_gradient_and_counts_match_the_definition(case: str, given: Sequences):
    """Covers Liger#1088, Liger#1082 (a GRPO gradient a hundred times off)."""
    config, oracle = ORACLES[case]
    result, found = run(given, config)
    loss, grads, num_clipped = oracle(given)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert found == pytest.approx(grads, rel=1e-9, abs=1e-12)
    assert int(result.num_clipped_low + result.num_clipped_high) == num_clipped
    assert int(result.num_loss_tokens) == sum(weight != 0 for _, tokens in given for _, _, weight in tokens)


@pytest.mark.parametrize("case", ORACLES)
@given(given=sequences, cut=st.integers(0, 5))
def test_responses_may_stand_in_any_microbatch(case: str, given: Sequences, cut: int):
    config, _ = ORACLES[case]
    whole, whole_grad = run(given, config)
    parts = [run(part, config) for part in (given[:cut], given[cut:])]
    assert sum(float(part.loss.detach()) for part, _ in parts) == pytest.approx(
        float(whole.loss.detach()), rel=1e-9, abs=1e-12
    )
    assert [value for _, grads in parts for value in grads] == pytest.approx(whole_grad, rel=1e-9, abs=1e-12)


def test_gspo_with_a_mean_over_sequences_is_the_papers_objective():
    """1/G Σ s A with tokens' log-probs averaged: each response weighs the same, however long."""
    lengths, advantages = [4, 1], [1.0, -2.0]
    given: Sequences = [
        (advantage, [(-1.0 - 0.1 * i, -1.0, 1 / (length * 2)) for i in range(length)])
        for length, advantage in zip(lengths, advantages, strict=True)
    ]
    result, _ = run(given, AlgorithmConfig(name="gspo", clip_low=0.9, clip_high=9.0))
    assert float(result.loss.detach()) == pytest.approx(-(math.exp(-0.15) * 1.0 + 1.0 * -2.0) / 2)


def test_the_dual_clip_bounds_what_a_bad_response_can_cost():
    policy_M = torch.tensor([4.0, 4.0, 0.5], requires_grad=True)
    args = (policy_M, torch.zeros(3), torch.tensor([-1.0, 1.0, -1.0]), torch.ones(3))
    bounded = clipped_policy_loss(*args, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    unbounded = clipped_policy_loss(*args, clip_low=0.2, clip_high=0.2)
    assert float(bounded.loss.detach()) == pytest.approx(3.0 - 1.2 + math.exp(0.5))
    assert float(unbounded.loss.detach()) == pytest.approx(math.exp(4.0) - 1.2 + math.exp(0.5))
    bounded.loss.backward()
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5)])


@pytest.mark.parametrize("case", ORACLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio", [-1e30, -1e4, -89.0, 89.0, 1e4, 1e30, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_extreme_ratios_leave_a_finite_gradient(case: str, dtype: torch.dtype, log_ratio: float, advantage: float):
    """Covers TRL#4772 (a sequence's ratio explodes)."""
    config, _ = ORACLES[case]
    policy_M = torch.tensor([-1.0, -1.0, -1.0], dtype=dtype, requires_grad=True)
    old_M = torch.tensor([-1.0 - log_ratio, -1.0, -1.0], dtype=dtype)
    sequence_of_M = torch.tensor([0, 0, 1])
    result = policy_loss(
        config, policy_M, old_M, torch.full((3,), advantage), torch.full((3,), 0.5), sequence_of_M, num_sequences=2
    )
    result.loss.backward()
    assert policy_M.grad is not None
    assert torch.isfinite(policy_M.grad).all()
    assert float(policy_M.grad[2]) == pytest.approx(-0.5 * advantage), "the other response notices nothing"
    for name in ("loss", "sum_ratio", "sum_kl_k3"):
        assert math.isfinite(float(getattr(result, name).detach())), name
    assert float(result.max_abs_log_ratio) == pytest.approx(abs(log_ratio), rel=1e-2)


@pytest.mark.parametrize("case", ORACLES)
def test_masked_tokens_are_never_looked_at(case: str):
    """Alone in their response, and beside a token that counts, which has the whole response's ratio to itself."""
    config, _ = ORACLES[case]
    nan, inf = math.nan, math.inf
    policy_M = torch.tensor([-0.9, nan, -inf, nan], requires_grad=True)
    old_M = torch.tensor([-1.0, nan, -inf, 0.0])
    advantages_M = torch.tensor([1.0, nan, inf, nan])
    weights_M = torch.tensor([0.5, 0.0, 0.0, 0.0])
    sequence_of_M = torch.tensor([0, 0, 1, 1])
    result = policy_loss(config, policy_M, old_M, advantages_M, weights_M, sequence_of_M, num_sequences=2)
    result.loss.backward()
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == pytest.approx([-0.5 * math.exp(0.1), 0.0, 0.0, 0.0], rel=1e-5)
    assert math.isfinite(float(result.loss.detach())) and float(result.max_abs_log_ratio) == pytest.approx(0.1)


@pytest.mark.parametrize("case", ORACLES)
def test_a_scored_nan_is_not_hidden(case: str):
    config, _ = ORACLES[case]
    ones_M = torch.ones(2)
    result = policy_loss(
        config,
        torch.tensor([math.nan, -1.0]),
        ones_M,
        ones_M,
        ones_M,
        torch.zeros(2, dtype=torch.int32),
        num_sequences=1,
    )
    assert math.isnan(float(result.loss))


@pytest.mark.parametrize("case", ORACLES)
@pytest.mark.parametrize("num_sequences", [0, 3])
def test_no_scored_tokens_still_has_a_graph(case: str, num_sequences: int):
    """No responses, or responses without a token."""
    config, _ = ORACLES[case]
    weight = torch.ones(3, requires_grad=True)
    none_M = torch.zeros(0)
    result = policy_loss(
        config,
        (weight * 2.0)[:0],
        none_M,
        none_M,
        none_M,
        torch.zeros(0, dtype=torch.int32),
        num_sequences=num_sequences,
    )
    result.loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0] * 3
    for name in PolicyLoss.__slots__:
        assert float(getattr(result, name).detach()) == 0.0


@pytest.mark.parametrize("case", ORACLES)
def test_only_the_policy_gets_a_gradient(case: str):
    config, _ = ORACLES[case]
    policy_M, old_M, advantages_M, weights_M = (torch.rand(3, requires_grad=True) for _ in range(4))
    policy_loss(
        config, policy_M, old_M, advantages_M, weights_M, torch.tensor([0, 0, 1]), num_sequences=2
    ).loss.backward()
    assert policy_M.grad is not None
    assert old_M.grad is None and advantages_M.grad is None and weights_M.grad is None


def test_gspo_gradcheck_away_from_the_kinks():
    old_M = -torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy_M = (old_M + 0.1).requires_grad_()
    sequence_of_M = torch.tensor([0, 0, 0, 2, 2, 3, 3])
    advantages_M = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5, 0.5], dtype=torch.float64)

    def loss(policy: torch.Tensor) -> torch.Tensor:
        return gspo_policy_loss(
            policy, old_M, advantages_M, advantages_M.abs(), sequence_of_M, num_sequences=5, clip_low=0.2, clip_high=0.2
        ).loss

    assert torch.autograd.gradcheck(loss, (policy_M,))


def test_cispo_keeps_the_gradient_that_the_clip_drops():
    policy_M = torch.tensor([-0.1], requires_grad=True)
    args = (policy_M, torch.tensor([-2.0]), torch.ones(1), torch.ones(1))
    clipped_policy_loss(*args, clip_low=0.2, clip_high=0.2).loss.backward()
    assert policy_M.grad is not None and policy_M.grad.tolist() == [0.0]
    policy_M.grad = None
    cispo_policy_loss(*args, clip_low=None, clip_high=0.2).loss.backward()
    assert policy_M.grad is not None
    assert policy_M.grad.tolist() == pytest.approx([-1.2])
