"""The algorithm's settings: paper defaults by name, given values win, nonsense is refused."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from ratoon.algorithms import AlgorithmConfig

NAMES = ("grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo")

PAPERS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.2, "loss_mean": "sequence"},
    "dr-grpo": {"normalize_by_std": False, "loss_mean": "constant"},
    "dapo": {"clip_high": 0.28, "loss_mean": "token", "dynamic_sampling": True, "max_sampling_rounds": 10},
    "rloo": {"advantage": "leave-one-out", "normalize_by_std": False, "loss_mean": "constant"},
    "reinforce++": {"advantage": "batch"},
    "reinforce++-baseline": {"advantage": "group-then-batch"},
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "policy_loss": "cispo",
        "clip_low": None,
        "clip_high": 4.0,
        "loss_mean": "token",
        "dynamic_sampling": True,
        "max_sampling_rounds": 10,
    },
}
PLAIN: dict[str, Any] = {
    "advantage": "group",
    "normalize_by_std": True,
    "policy_loss": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "loss_mean": "sequence",
    "entropy_coefficient": 0.0,
    "num_minibatches": 1,
    "kl_coefficient": 0.0,
    "kl_in": None,
    "kl_estimator": None,
    "mismatch_correction": "none",
    "mismatch_max_ratio": None,
    "mismatch_min_ratio": None,
    "mismatch_sequence_ratio": None,
    "dynamic_sampling": False,
    "max_sampling_rounds": None,
    "mask_truncated": False,
}


def config_of(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(given)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_sets_what_the_papers_set(name: str):
    assert config_of(name=name).model_dump() == {**PLAIN, **PAPERS[name], "name": name}


def test_the_default_is_plain_grpo():
    assert AlgorithmConfig() == AlgorithmConfig(name="grpo")


def test_a_given_value_wins():
    config = AlgorithmConfig(name="dapo", clip_high=0.2, loss_mean="sequence", dynamic_sampling=False)
    assert (config.clip_high, config.loss_mean, config.max_sampling_rounds) == (0.2, "sequence", None)
    assert AlgorithmConfig(loss_mean="token").clip_high == 0.2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"name": "dapo", "policy_loss": "gspo"}, {"clip_low": 3e-4, "clip_high": 4e-4, "loss_mean": "token"}),
        ({"name": "gspo", "policy_loss": "clip"}, {"clip_low": 0.2, "clip_high": 0.2}),
        ({"name": "cispo", "clip_low": 0.5}, {"clip_low": 0.5, "clip_high": 4.0}),
        ({"name": "rloo", "advantage": "group"}, {"normalize_by_std": True}),
        ({"name": "dr-grpo", "advantage": "batch"}, {"normalize_by_std": True}),
        ({"name": "grpo", "advantage": "leave-one-out"}, {"normalize_by_std": False}),
        ({"kl_coefficient": 0.1}, {"kl_in": "loss", "kl_estimator": "k3"}),
        ({"kl_coefficient": 1}, {"kl_in": "loss", "kl_estimator": "k3"}),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, {"kl_estimator": "k1"}),
        ({"name": "rloo", "kl_coefficient": 0.1}, {"kl_in": "reward", "kl_estimator": "k1"}),
        ({"name": "reinforce++", "kl_coefficient": 0.1}, {"kl_in": "reward", "kl_estimator": "k1"}),
        ({"name": "rloo", "kl_coefficient": 0.1, "kl_in": "loss"}, {"kl_estimator": "k3"}),
        ({"name": "reinforce++-baseline", "kl_coefficient": 0.1}, {"kl_in": "loss", "kl_estimator": "k2"}),
        ({"mismatch_correction": "token-tis"}, {"mismatch_max_ratio": 2.0}),
        ({"mismatch_correction": "masked-is"}, {"mismatch_max_ratio": 2.0}),
        ({"mismatch_correction": "icepop"}, {"mismatch_min_ratio": 0.5, "mismatch_max_ratio": 5.0}),
        (
            {"mismatch_correction": "sequence-masked-is"},
            {"mismatch_max_ratio": 3.0, "mismatch_sequence_ratio": "product"},
        ),
        (
            {"mismatch_correction": "sequence-tis", "mismatch_sequence_ratio": "geometric-mean"},
            {"mismatch_max_ratio": 2.0, "mismatch_sequence_ratio": "geometric-mean"},
        ),
        ({"dynamic_sampling": True, "max_sampling_rounds": 3}, {"max_sampling_rounds": 3}),
    ],
)
def test_a_choice_sets_what_follows_from_it(given: dict[str, Any], wanted: dict[str, Any]):
    config = config_of(**given)
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert AlgorithmConfig.model_validate(config.model_dump(exclude_none=True)) == config, "as a resolved recipe"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_a_resolved_recipe_reads_back_the_same(name: str, kl_coefficient: float):
    config = config_of(name=name, kl_coefficient=kl_coefficient)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert AlgorithmConfig.model_validate(config.model_dump(exclude_none=True)) == config


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ({"name": "rloo", "normalize_by_std": True}, "normalize_by_std", "leave-one-out"),
        ({"name": "reinforce++", "normalize_by_std": False}, "normalize_by_std", "always divides"),
        ({"name": "reinforce++-baseline", "normalize_by_std": False}, "normalize_by_std", "always divides"),
        ({"clip_low": None}, "clip_low", "only cispo"),
        ({"name": "cispo", "dual_clip": 3.0, "num_minibatches": 2}, "dual_clip", "cispo"),
        ({"name": "gspo", "dual_clip": 3.0, "num_minibatches": 2}, "dual_clip", "gspo"),
        ({"dual_clip": 3.0}, "dual_clip", "num_minibatches = 1"),
        ({"kl_in": "loss"}, "kl_in", "kl_coefficient = 0"),
        ({"kl_estimator": "k2"}, "kl_estimator", "kl_coefficient = 0"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator", "0 on average"),
        ({"name": "rloo", "kl_coefficient": 0.1, "kl_in": "loss", "kl_estimator": "k1"}, "kl_estimator", "gradient"),
        ({"kl_coefficient": 0.1, "kl_in": None}, "kl_in", "empty"),
        ({"mismatch_max_ratio": 2.0}, "mismatch_max_ratio", "'none'"),
        ({"mismatch_correction": "token-tis", "mismatch_min_ratio": 0.5}, "mismatch_min_ratio", "icepop"),
        ({"mismatch_correction": "icepop", "mismatch_sequence_ratio": "product"}, "mismatch_sequence_ratio", "icepop"),
        ({"mismatch_correction": "icepop", "mismatch_min_ratio": None}, "mismatch_min_ratio", "empty"),
        ({"max_sampling_rounds": 3}, "max_sampling_rounds", "dynamic_sampling"),
        ({"name": "dapo", "dynamic_sampling": False, "max_sampling_rounds": 3}, "max_sampling_rounds", "turn that on"),
    ],
)
def test_a_field_that_cannot_act_is_refused(given: dict[str, Any], key: str, reason: str):
    """prime-rl#2738: a setting that did nothing."""
    with pytest.raises(ValidationError) as error:
        AlgorithmConfig.model_validate(given)
    (problem,) = error.value.errors()
    assert problem["msg"].removeprefix("Value error, ").startswith(key)
    assert reason in problem["msg"]


def test_what_an_algorithm_needs():
    assert not AlgorithmConfig(name="reinforce++").compares_siblings
    assert all(config_of(name=name).compares_siblings for name in NAMES if name != "reinforce++")
    # With one response a prompt, every group has equal rewards, and none would be kept.
    assert AlgorithmConfig(name="reinforce++", dynamic_sampling=True).compares_siblings
    assert not AlgorithmConfig().needs_reference and AlgorithmConfig(kl_coefficient=0.1).needs_reference
    assert not AlgorithmConfig().needs_rollout_logprobs
    assert AlgorithmConfig(mismatch_correction="icepop").needs_rollout_logprobs


def test_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        AlgorithmConfig().clip_low = 0.1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"name": "pppo"}, "name"),
        ({"name": ["grpo"]}, "name"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": float("inf")}, "clip_high"),
        ({"clip_high": float("nan")}, "clip_high"),
        ({"loss_mean": "batch"}, "loss_mean"),
        ({"policy_loss": ["clip"]}, "policy_loss"),
        ({"advantage": "gae"}, "advantage"),
        ({"dual_clip": 1.0, "num_minibatches": 2}, "dual_clip"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"kl_coefficient": "much"}, "kl_coefficient"),
        ({"mismatch_correction": "tis"}, "mismatch_correction"),
        ({"mismatch_correction": "token-tis", "mismatch_max_ratio": 0.9}, "mismatch_max_ratio"),
        ({"mismatch_correction": "icepop", "mismatch_min_ratio": 1.1}, "mismatch_min_ratio"),
        ({"dynamic_sampling": True, "max_sampling_rounds": 0}, "max_sampling_rounds"),
        ({"entropy_coefficient": -0.01}, "entropy_coefficient"),
        ({"num_minibatches": 0}, "num_minibatches"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
    ],
)
def test_nonsense_is_refused_by_key_and_alone(given: dict[str, object], key: str):
    with pytest.raises(ValidationError) as error:
        AlgorithmConfig.model_validate(given)
    assert [problem["loc"] for problem in error.value.errors()] == [(key,)]


def test_something_else_than_a_table_is_refused():
    with pytest.raises(ValidationError):
        AlgorithmConfig.model_validate("grpo")


def test_every_field_is_described():
    assert all(field.description for field in AlgorithmConfig.model_fields.values())


def test_config_and_advantages_import_no_torch():
    code = (
        "import sys; from ratoon.algorithms import AlgorithmConfig, soft_overlong_penalty, step_advantages; "
        "step_advantages([[0.0, 1.0]], AlgorithmConfig()); soft_overlong_penalty([3], max_response_tokens=4, "
        "buffer_tokens=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
