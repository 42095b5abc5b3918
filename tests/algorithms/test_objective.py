"""How the parts of the objective add up, in numbers small enough to write out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ratoon.algorithms import AlgorithmConfig, ScoredTokens, microbatch_objective


def tokens_of(**changed: Any) -> ScoredTokens:
    """Two responses of two tokens; the policy is the old one but for the last token, whose ratio is e^0.1."""
    policy_M = torch.tensor([-1.0, -2.0, -1.5, -0.4], dtype=torch.float64)
    tokens = ScoredTokens(
        policy_logprobs_M=policy_M.clone().requires_grad_(),
        entropy_M=torch.tensor([1.0, 1.2, 0.8, 0.6], dtype=torch.float64),
        old_logprobs_M=torch.tensor([-1.0, -2.0, -1.5, -0.5], dtype=torch.float64),
        advantages_M=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        loss_weights_M=torch.full((4,), 0.25, dtype=torch.float64),
        sequence_of_M=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        rollout_logprobs_M=torch.tensor([-1.0, -2.0, -1.5 - math.log(4.0), -0.5], dtype=torch.float64),
        ref_logprobs_M=torch.tensor([-1.0, -2.0, -1.5, -1.4], dtype=torch.float64),
    )
    return replace(tokens, **changed)


def test_the_parts_add_up():
    config = AlgorithmConfig.model_validate(
        {"entropy_coefficient": 0.5, "kl_coefficient": 0.3, "mismatch_correction": "masked-is"}
    )
    result = microbatch_objective(config, tokens_of())
    # The third token's ratio of 4 is masked: it leaves the policy loss, not entropy or KL.
    policy = -0.25 * (1.0 + 1.0 + 0.0 - math.exp(0.1))
    kl = 0.25 * (math.exp(-1.0) - 1 + 1.0)
    assert float(result.loss.detach()) == pytest.approx(policy - 0.5 * 0.9 + 0.3 * kl)
    assert result.kl is not None and result.correction is not None and result.mismatch is not None
    assert float(result.kl.sum_kl) == pytest.approx(4 * kl)
    assert (int(result.correction.num_corrected), float(result.correction.sum_factor)) == (1, 3.0)
    assert int(result.policy.num_loss_tokens) == 4, "a masked token stays in the denominators"
    assert float(result.mismatch.max_ratio) == pytest.approx(4.0), "measured before it is masked"


def test_without_a_correction_the_gap_is_only_measured():
    plain = microbatch_objective(AlgorithmConfig(), tokens_of(rollout_logprobs_M=None))
    measured = microbatch_objective(AlgorithmConfig(), tokens_of())
    assert float(plain.loss.detach()) == float(measured.loss.detach())
    assert plain.mismatch is None and measured.mismatch is not None
    assert measured.correction is None and measured.kl is None


def test_kl_in_the_reward_is_no_term_of_the_loss():
    config = AlgorithmConfig(kl_coefficient=0.3, kl_in="reward")
    result = microbatch_objective(config, tokens_of(ref_logprobs_M=None))
    assert result.kl is None
    assert float(result.loss.detach()) == float(microbatch_objective(AlgorithmConfig(), tokens_of()).loss.detach())


def test_what_is_missing_is_named():
    with pytest.raises(AssertionError, match="icepop needs the engine's log-probs"):
        microbatch_objective(AlgorithmConfig(mismatch_correction="icepop"), tokens_of(rollout_logprobs_M=None))
    with pytest.raises(AssertionError, match="needs a reference"):
        microbatch_objective(AlgorithmConfig(kl_coefficient=0.1), tokens_of(ref_logprobs_M=None))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_correction_weighs_the_gradient_of_its_token(name: str):
    """One update: old is the policy itself."""
    given = {"name": name, "mismatch_correction": "token-tis", "mismatch_max_ratio": 3.0}
    tokens = tokens_of()
    tokens = replace(tokens, old_logprobs_M=tokens.policy_logprobs_M.detach())
    microbatch_objective(AlgorithmConfig.model_validate(given), tokens).loss.backward()
    assert tokens.policy_logprobs_M.grad is not None
    ratio = math.exp(0.1)
    wanted = [-0.25, -0.25, 0.25 * 3.0, 0.25 * ratio]
    if name == "gspo":  # the ratio is the response's: its tokens share what weighs it
        wanted[2:] = [0.25 * (3.0 + ratio) / 2] * 2
    assert tokens.policy_logprobs_M.grad.tolist() == pytest.approx(wanted)
