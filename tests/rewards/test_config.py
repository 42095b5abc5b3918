import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ratoon.config import load_recipe
from ratoon.config.loading import dump_recipe
from ratoon.rewards import RewardComponent, RewardConfig
from ratoon.rewards.config import python_target
from ratoon.types import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "exact"}, 'must be "reasoning-gym", "exact-match"'),
        ({}, "either `function`, or one or more [[reward.components]] with a function each; got neither"),
        ({"function": "exact-match", "components": [{"function": "format"}]}, "got both"),
        ({"components": [{"function": "exact"}]}, 'components: function must be "reasoning-gym"'),
        (
            {"components": [{"function": "format"}, {"function": "format"}]},
            'two of reward.components are called "format"',
        ),
        ({"components": [{"function": "format", "name": "a b"}]}, "must begin with a letter"),
        ({"components": [{"function": "format", "weight": math.nan}]}, "finite"),
        ({"components": [{"function": "format"}], "extract": "boxed"}, "reward.extract acts on one function"),
        ({"function": "format", "extract": "boxed"}, "extract = 'boxed' cannot act on a format reward; it is for"),
        ({"function": "exact-match", "pattern": "a"}, "pattern = 'a' cannot act on a exact-match reward"),
        ({"function": "exact-match", "buffer_tokens": 3}, 'it is for "soft-overlong"'),
        ({"function": "soft-overlong"}, "needs buffer_tokens"),
        ({"function": "regex"}, "needs a pattern"),
        ({"function": "regex", "pattern": "(a"}, "no regular expression"),
        ({"function": "regex", "pattern": "a", "match": "all"}, "'search' or 'full'"),
        ({"function": "format", "tags": ["<think>"]}, "tags are given by name"),
        ({"function": "format", "tags": []}, "one or more different names"),
        ({"function": "format", "tags": ["a", "a"]}, "one or more different names"),
        ({"function": "math-verify", "extract": "last-number"}, "would hide the mathematics"),
        ({"function": "exact-match", "on_failure": "skip"}, "'raise', 'zero' or 'drop'"),
        ({"function": "exact-match", "num_workers": 0}, "greater than or equal to 1"),
        ({"function": "python:score"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.txt:score"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:score()"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:score", "extract": "last-number"}, "cannot act on a Python function"),
        ({"function": "exact-match", "extract": "number"}, "'text', 'last-number', 'answer-tag' or 'boxed'"),
        ({"function": "exact-match", "timeout_s": 0}, "greater than 0"),
        ({"function": "exact-match", "timeout_s": math.inf}, "finite"),
        ({"function": "exact-match", "timeout": 3}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        RewardConfig.model_validate(settings)


def test_a_python_target_may_hold_colons():
    assert python_target("python:C:/x/r.py:score") == ("C:/x/r.py", "score")
    assert python_target("exact-match") is None


def test_one_function_is_one_component():
    config = RewardConfig(function="regex", pattern="a+", match="full")
    (component,) = config.all_components
    assert (component.function, component.pattern, component.match, component.weight) == ("regex", "a+", "full", 1.0)
    assert config.names == ("regex",)
    assert config.specs[0].key == "reward.function"


def test_components_have_names_keys_and_files():
    config = RewardConfig(
        components=(
            RewardComponent(function="python:a/b.py:score"),
            RewardComponent(function="reasoning-gym"),
            RewardComponent(function="python:c.py:f", name="style", weight=0.1),
        )
    )
    assert config.names == ("score", "reasoning_gym", "style")
    assert config.python_files == {"reward.components[0].function": "a/b.py", "reward.components[2].function": "c.py"}
    assert RewardConfig(function="exact-match").python_files == {}


def test_bounds_are_those_of_weighted_sums_of_what_is_known():
    overlong = {"function": "soft-overlong", "buffer_tokens": 3}
    components = [{"function": "math-verify", "weight": 2.0}, {**overlong, "weight": 0.5}]
    assert RewardConfig(function="exact-match").bounds == (0.0, 1.0)
    assert RewardConfig.model_validate({"components": components}).bounds == (-0.5, 2.0)
    against = {"components": [{"function": "format", "weight": -1.0}, {"function": "regex", "pattern": "a"}]}
    assert RewardConfig.model_validate(against).bounds == (-1.0, 1.0)
    with_a_function = {"components": [*components, {"function": "python:a.py:score"}]}
    assert RewardConfig.model_validate(with_a_function).bounds is None


def test_a_recipe_may_hold_components(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'run.name = "x"\nmodel.fresh = {}\ndata.source = "d.jsonl"\n[reward]\non_failure = "zero"\n'
        '[[reward.components]]\nfunction = "format"\ntags = ["a", "b"]\nweight = 0.2\n'
        '[[reward.components]]\nfunction = "exact-match"\nextract = "boxed"\n'
    )
    loaded = load_recipe(recipe)
    assert loaded.reward.components[0].tags == ("a", "b")
    recipe.write_text(dump_recipe(loaded))
    assert load_recipe(recipe) == loaded
    recipe.write_text(recipe.read_text().replace("weight", "wait"))
    with pytest.raises(UserError, match=r"wait.*is not a key of \[reward\.components\].*weight"):
        load_recipe(recipe)


@pytest.mark.parametrize("model", [RewardConfig, RewardComponent])
def test_every_setting_is_described(model: type[BaseModel]):
    assert all(field.description for field in model.model_fields.values())
