"""A frozen second model scores what the policy is scored on, and nothing else happens to either."""

import numpy as np
import pytest
import torch
from tests.parity.families import build_model
from tests.parity.step_oracle import ragged_groups
from tests.trainer.test_trainer import make_trainer, plan, weights

from ratoon.layout import pack_groups
from ratoon.models import attach, forward_logprobs
from ratoon.trainer import frozen_reference
from ratoon.trainer import reference as reference_module
from ratoon.types import SampledSupport

torch.set_num_threads(1)


def test_scores_are_the_models_at_the_rollouts_temperature():
    model = attach(build_model("llama", seed=1, dtype=torch.float32))
    layout = pack_groups(ragged_groups())
    wanted_M, _ = forward_logprobs(model, layout, 0.7)
    model.train()
    found_M = frozen_reference(model, 0.7)(layout, None)
    assert torch.equal(found_M, wanted_M)
    assert not found_M.requires_grad and found_M.grad_fn is None
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_support_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        reference_module,
        "forward_logprobs",
        lambda model, layout, temperature, support: (seen.append((temperature, support)), (torch.zeros(1), None))[1],
    )
    support = SampledSupport(np.array([0, 1]), np.array([3]))
    frozen_reference(build_model("llama"), 0.5)(pack_groups([]), support)
    assert seen == [(0.5, support)]


def test_the_policy_is_its_own_reference_at_first_and_not_afterwards():
    """KL is exactly 0 before an update and positive after it, and its gradient pulls back towards the reference."""
    frozen = attach(build_model("llama", dtype=torch.float32))
    for kl_in in ("loss", "reward"):
        trainer = make_trainer(kl_coefficient=0.1, kl_in=kl_in, kl_estimator="k3")
        trainer.reference = frozen_reference(frozen, 1.0)
        updates = plan(ragged_groups(), max_rows=20)
        assert np.abs(np.concatenate(trainer.kl_to_reference(updates[0]))).max() == 0
        first = trainer.step(updates, learning_rate=1e-2)
        assert first.kl_ref_mean == (0 if kl_in == "loss" else None)
        assert np.concatenate(trainer.kl_to_reference(updates[0])).sum() > 0.1
        if kl_in == "loss":
            assert (trainer.step(updates, learning_rate=1e-2).kl_ref_mean or 0) > 0.01


def test_a_large_penalty_brings_the_policy_back():
    frozen = attach(build_model("llama", dtype=torch.float32))
    trainer = make_trainer(kl_coefficient=100.0)
    trainer.reference = frozen_reference(frozen, 1.0)
    with torch.no_grad():
        for master in trainer.optimizer.masters:
            master += 0.02 * torch.randn(master.shape, generator=torch.Generator().manual_seed(0))
    trainer.model.load_state_dict(trainer.model.state_dict())
    updates = plan(ragged_groups())
    kls = [trainer.step(updates, learning_rate=1e-3).kl_ref_mean or 0.0 for _ in range(20)]
    assert kls[0] > 0.01 and kls[-1] < 0.5 * kls[0]


def test_measuring_changes_neither_weights_nor_gradients():
    trainer = make_trainer(name="rloo", kl_coefficient=0.1)
    trainer.reference = frozen_reference(attach(build_model("llama", seed=1, dtype=torch.float32)), 1.0)
    before = weights(trainer)
    found = trainer.kl_to_reference(plan(ragged_groups())[0])
    assert all(torch.equal(now, then) for now, then in zip(weights(trainer), before, strict=True))
    assert all(master.grad is None for master in trainer.optimizer.masters)
    assert [kl_N.shape for kl_N in found] == [(group.group_size,) for group in ragged_groups()]


def test_kl_is_measured_without_dropout_and_the_mode_is_kept():
    trainer = make_trainer(name="rloo", kl_coefficient=0.1)
    trainer.reference = frozen_reference(attach(build_model("llama", seed=1, dtype=torch.float32)), 1.0)
    modes = []
    trainer.model.base_model.register_forward_pre_hook(lambda module, given: modes.append(module.training))
    for mode in (True, False):
        trainer.model.train(mode)
        trainer.kl_to_reference(plan(ragged_groups(), max_rows=20)[0])
        assert trainer.model.training == mode
    assert len(modes) > 4 and not any(modes)


def test_kl_in_the_reward_costs_the_step_no_reference_pass():
    trainer = make_trainer(name="rloo", kl_coefficient=0.1)  # without a reference, which it would miss
    trainer.max_response_tokens = 8
    assert trainer.step(plan(ragged_groups()), learning_rate=1e-3).kl_ref_mean is None


def test_a_missing_reference_is_named():
    with pytest.raises(AssertionError, match="a KL penalty needs a reference model"):
        make_trainer(kl_coefficient=0.1).step(plan(ragged_groups()), learning_rate=1e-3)
    with pytest.raises(AssertionError, match="there is no KL penalty to compute"):
        make_trainer().kl_to_reference(plan(ragged_groups())[0])
