"""The reference of a LoRA run."""

from pathlib import Path

import pytest
import torch
from tests.models.test_adapters import GROUPS, adapted, randomize, trained
from tests.parity.families import build_model

from ratoon.layout import pack_groups
from ratoon.models import attach, forward_logprobs
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
