import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from ratoon.rewards import RewardConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "exact"}, 'must be "reasoning-gym", "exact-match"'),
        ({"function": "python:score"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.txt:score"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:score()"}, "python:FILE.py:FUNCTION"),
        ({"function": "python:rewards.py:score", "extract": "last-number"}, "cannot act on a Python function"),
        ({"function": "exact-match", "extract": "number"}, "'text', 'last-number' or 'answer-tag'"),
        ({"function": "exact-match", "timeout_s": 0}, "greater than 0"),
        ({"function": "exact-match", "timeout_s": math.inf}, "finite"),
        ({"function": "exact-match", "timeout": 3}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        RewardConfig.model_validate(settings)


def test_a_python_target_may_hold_colons():
    assert RewardConfig(function="python:C:/x/r.py:score").python_target == ("C:/x/r.py", "score")
    assert RewardConfig(function="exact-match").python_target is None


def test_every_setting_is_described():
    assert all(field.description for field in RewardConfig.model_fields.values())
