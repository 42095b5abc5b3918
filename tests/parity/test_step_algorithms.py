"""A step of every algorithm, KL and correction against one forward per sequence and the papers' formulas (float64)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.parity.families import build_model, kept_in_float64
from tests.parity.step_oracle import (
    FAMILY,
    NARROW,
    REFERENCE_SEED,
    Outcome,
    algorithm_cases,
    assert_same_outcome,
    kl_by_hand,
    make_trainer,
    ragged_groups,
    reference_model,
    run_by_hand,
    run_trainer,
    score,
)
from tests.parity.test_step_invariance import num_responses, plan, with_cut

from ratoon.algorithms import AlgorithmConfig
from ratoon.trainer import Update
from ratoon.types import Response, RolloutGroup

torch.set_num_threads(1)

CASES = algorithm_cases()


@cache
def groups_of_a_step() -> tuple[RolloutGroup, ...]:
    """Drawn by an engine whose log-probs are off by 0.3 nats. After the first update a bad response's ratio exceeds the
    dual clip."""
    model = build_model(FAMILY)
    model.set_attn_implementation("eager")
    rng = np.random.default_rng(0)

    def drawn(group: RolloutGroup, response: Response) -> Response:
        if response.num_tokens == 0:
            return response
        logprobs = score(model, group, response)[0].numpy() + rng.normal(0.0, 0.3, response.num_tokens)
        return replace(response, rollout_logprobs=np.minimum(logprobs, 0.0))

    with kept_in_float64(), torch.no_grad():
        return tuple(
            replace(group, responses=tuple(drawn(group, response) for response in group.responses))
            for group in ragged_groups(seed=3)
        )


@cache
def expected(case: str) -> Outcome:
    groups = groups_of_a_step()
    return run_by_hand([groups[0::2], groups[1::2]], CASES[case])


def scattered(share: bool) -> list[Update]:
    """Responses dealt at random to three microbatches, siblings apart."""
    rng = np.random.default_rng(3)
    return [
        with_cut(update, rng.integers(0, 3, num_responses(update)).tolist(), 3)
        for update in plan(groups_of_a_step(), 2, share=share)
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_step_agrees_with_the_papers_formulas(case: str):
    """Shared or repeated prompts, whole or in pieces: the same loss, gradients, weights and report.

    Liger#1088 (a GRPO gradient off by two orders of magnitude), verl#6957.
    """
    cuts: dict[str, Sequence[Update]] = {
        "repeated, in pieces": plan(groups_of_a_step(), 2, share=False, max_rows=13),
        "shared, siblings apart": scattered(share=True),
    }
    for cut, updates in cuts.items():
        found, result = run_trainer(updates, CASES[case])
        assert_same_outcome(found, expected(case), f"{case}, {cut}")
        for name, value in expected(case).reported().items():
            reported = getattr(result, name)
            assert (reported is None) == (value is None), name
            assert value is None or reported == pytest.approx(value, rel=1e-9, abs=1e-12), f"{case}, {cut}: {name}"


def test_every_part_acts():
    """Else the comparison would not see it: each case differs from plain GRPO's loss, or from another mean's."""
    losses = {case: expected(case).loss for case in CASES}
    same = {"reinforce++", "reinforce++-baseline"}  # their advantages differ, which are given here
    for case, loss in losses.items():
        if case not in {"grpo", *same}:
            assert abs(loss - losses["grpo"]) > 1e-3, case
    for case in CASES:
        config, outcome = CASES[case], expected(case)
        if config.mismatch_correction != "none":
            assert 0 < (outcome.corrected_fraction or 0) < 1, case
        if config.mismatch_correction in ("none", "token-tis"):
            assert 0.1 < outcome.clipped_fraction < 0.9, case
    assert losses["rloo"] == losses["dr-grpo"], "but for their advantages"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("share", [True, False])
def test_kl_in_the_reward_is_that_of_each_response_by_itself(estimator: str, share: bool):
    groups = groups_of_a_step()
    for max_rows in (13, 10_000):
        (update,) = plan(groups, 1, share=share, max_rows=max_rows)
        algorithm = AlgorithmConfig.model_validate(
            {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": estimator}
        )
        trainer = make_trainer(algorithm)
        with kept_in_float64():
            found = trainer.kl_to_reference(update)
        assert [kl_N.shape for kl_N in found] == [(group.group_size,) for group in update.groups]
        np.testing.assert_allclose(np.concatenate(found), kl_of_every_response(estimator), rtol=1e-9, atol=1e-12)


@cache
def kl_of_every_response(estimator: str) -> list[float]:
    policy, frozen = build_model(FAMILY), build_model(FAMILY, REFERENCE_SEED)
    policy.set_attn_implementation("eager")
    frozen.set_attn_implementation("eager")
    sums: list[float] = []
    with kept_in_float64(), torch.no_grad():
        for group in groups_of_a_step():
            for response in group.responses:
                if not response.num_tokens:
                    sums.append(0.0)
                    continue
                policy_R, ref_R = score(policy, group, response)[0], score(frozen, group, response)[0]
                kl_R = policy_R - ref_R if estimator == "k1" else kl_by_hand(policy_R, ref_R, estimator)
                sums.append(float(kl_R.sum()))
    return sums


def test_the_reference_stays_as_it_was():
    case = "k3"
    before = [parameter.clone() for parameter in reference_model().parameters()]
    run_trainer(plan(groups_of_a_step(), 2, share=True), CASES[case])
    for parameter, then in zip(reference_model().parameters(), before, strict=True):
        assert torch.equal(parameter, then)
        assert parameter.grad is None and not parameter.requires_grad
    assert not reference_model().training


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_with_one_update_all_policy_losses_have_one_gradient(name: str):
    """At ratio 1 neither bound nor level of the ratio matters. CISPO's value differs, its gradient does not."""
    settings = {**NARROW, "num_minibatches": 1, "loss_mean": "sequence"}
    first, _ = run_trainer(plan(groups_of_a_step(), 1, share=True), AlgorithmConfig(**settings))
    found, result = run_trainer(plan(groups_of_a_step(), 1, share=True), AlgorithmConfig(**{"name": name, **settings}))
    assert result.clipped_fraction == 0
    for parameter, gradient in first.gradients[0].items():
        torch.testing.assert_close(found.gradients[0][parameter], gradient, rtol=1e-9, atol=1e-12)
