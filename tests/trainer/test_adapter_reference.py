"""The reference of a LoRA run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.test_adapters import GROUPS, adapted, randomize, trained
from tests.parity.families import build_model
from tests.parity.step_oracle import ragged_groups

from ratoon.algorithms import AlgorithmConfig
from ratoon.distributed import single_process
from ratoon.layout import pack_groups
from ratoon.loop.stages import plan_updates
from ratoon.models import attach, forward_logprobs
from ratoon.planner import CostModel
from ratoon.trainer import MasterOptimizer, Trainer
from ratoon.trainer.adapter_reference import adapters_off_reference, saved_adapters_reference
from ratoon.trainer.model_folder import save_model
from ratoon.trainer.reference import frozen_reference


def test_it_is_the_frozen_base_whatever_the_adapters_became():
    layout = pack_groups(GROUPS)
    model = adapted("qwen3")
    score = adapters_off_reference(model, 0.7)
    expected_M = frozen_reference(attach(build_model("qwen3")), 0.7)(layout, None)
    for seed in (0, 1):
        randomize(model, seed)
        model.train()
        ref_logprobs_M = score(layout, None)
        assert torch.equal(ref_logprobs_M, expected_M) and not ref_logprobs_M.requires_grad
        policy_M, _ = forward_logprobs(model, layout, 0.7)
        assert (policy_M - ref_logprobs_M).abs().max() > 0.05
        assert model.training and len(trained(model)) == 2 * 2 * 7


def test_a_model_without_adapters_has_none():
    with pytest.raises(ValueError, match=r"has no adapters; its reference is a frozen_reference"):
        adapters_off_reference(attach(build_model("llama")), 1.0)


def test_saved_adapters_score_whatever_the_policy_s_became(tmp_path: Path):
    layout = pack_groups(GROUPS)
    model = adapted("qwen3")
    randomize(model, 0)
    save_model(model, None, tmp_path)
    with torch.no_grad():
        expected_M, _ = forward_logprobs(model, layout, 0.7)
    score = saved_adapters_reference(model, tmp_path, 0.7)
    randomize(model, 1)
    before = {name: parameter.detach().clone() for name, parameter in trained(model).items()}
    ref_logprobs_M = score(layout, None)
    assert torch.equal(ref_logprobs_M, expected_M) and not ref_logprobs_M.requires_grad
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained(model).items())
    policy_M, _ = forward_logprobs(model, layout, 0.7)
    assert (policy_M - ref_logprobs_M).abs().max() > 0.05
    policy_M.sum().backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


@pytest.mark.parametrize("num_updates", [1, 2])
@pytest.mark.parametrize("is_saved", [False, True])
def test_it_scores_the_microbatches_that_go_on_from_a_kept_prompt(is_saved: bool, num_updates: int, tmp_path: Path):
    """It changes the very weights that the prompt's graph will read in its backward pass."""

    def step(max_rows: int) -> tuple[float, list[torch.Tensor]]:
        model = adapted("qwen3")
        randomize(model, 0)
        if is_saved:
            save_model(model, None, tmp_path)
            reference = saved_adapters_reference(model, tmp_path, 0.7)
            randomize(model, 1)
        else:
            reference = adapters_off_reference(model, 0.7)
        trainer = Trainer(
            model,
            MasterOptimizer(model.parameters(), learning_rate=1.0, weight_decay=0.0, betas=(0.9, 0.95)),
            algorithm=AlgorithmConfig(kl_coefficient=0.3, num_minibatches=num_updates),
            temperature=0.7,
            max_grad_norm=1e3,
            data_parallel=single_process(),
            reference=reference,
        )
        updates = plan_updates(
            ragged_groups(),
            num_updates=num_updates,
            num_ranks=1,
            max_rows_per_microbatch=max_rows,
            cost=replace(CostModel(), seconds_per_microbatch=0.0),
            keeps_prompts=True,
        )
        assert any(any(update.plan.kept_runs) for update in updates) == (max_rows < 1000)
        result = trainer.step(updates, learning_rate=1e-3)
        assert result.kl_ref_mean is not None and result.kl_ref_mean > 0.01
        return result.grad_norm, [parameter.detach().clone() for parameter in trained(model).values()]

    (norm, weights), (wanted_norm, wanted) = step(max_rows=13), step(max_rows=1000)
    assert norm == pytest.approx(wanted_norm, rel=1e-9)
    for got, other in zip(weights, wanted, strict=True):
        assert torch.allclose(got, other, rtol=0, atol=1e-9)
