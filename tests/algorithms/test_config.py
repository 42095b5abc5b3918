"""The algorithm's settings: paper defaults by name, given values win, nonsense is refused."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from ratoon.algorithms import AlgorithmConfig


def test_the_name_sets_what_the_papers_set():
    grpo, dapo = AlgorithmConfig(), AlgorithmConfig(name="dapo")
    assert (grpo.name, grpo.clip_low, grpo.clip_high, grpo.loss_mean) == ("grpo", 0.2, 0.2, "sequence")
    assert (dapo.clip_low, dapo.clip_high, dapo.loss_mean) == (0.2, 0.28, "token")


def test_a_given_value_wins():
    config = AlgorithmConfig(name="dapo", clip_high=0.2, loss_mean="sequence")
    assert (config.clip_high, config.loss_mean) == (0.2, "sequence")
    assert AlgorithmConfig(loss_mean="token").clip_high == 0.2


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_resolved_recipe_reads_back_the_same(name: str):
    config = AlgorithmConfig.model_validate({"name": name})
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


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
        "import sys; from ratoon.algorithms import AlgorithmConfig, grpo_advantages; "
        "AlgorithmConfig(); grpo_advantages([0.0, 1.0]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
