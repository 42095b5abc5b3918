"""docs/metrics.md names everything that a run writes."""

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from ratoon.loop.diagnosis import StepDiagnosis
from ratoon.loop.evaluation import Answers, measure
from ratoon.trainer.rollout_table import ROLLOUT_SCHEMA
from ratoon.trainer.step_result import StepResult
from ratoon.types import Prompt, Response, RolloutGroup

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented(heading: str) -> set[str]:
    """First cells of the table rows under a heading."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section, f"docs/metrics.md has no heading {heading!r}"
    return set(re.findall(r"^\| `(\w+)`", section[1], re.MULTILINE))


@pytest.mark.parametrize("record", [StepDiagnosis, StepResult])
def test_every_field_of_a_training_step_is_documented(record: type):
    names = {field.name for field in fields(record)}
    assert names
    assert names <= documented("Rows of a training step")


def test_every_field_of_an_evaluation_is_documented():
    answers = Answers(num_responses_asked=2, generated=(), scored=(_scored_group(),))
    names = measure(answers, group_size=2, pass_threshold=1).metrics()
    assert {re.sub(r"pass_at_\d+", "pass_at_K", name) for name in names} == documented("Rows of an evaluation")


def _scored_group() -> RolloutGroup:
    response = Response(np.ones(1, int))
    return RolloutGroup(Prompt("p", np.ones(1, int)), (response, response), np.ones(2))


def test_every_column_of_the_rollouts_is_documented():
    assert {*ROLLOUT_SCHEMA.names, "reward_NAME"} == documented("Columns of rollouts/step-NNNNNN.parquet")
