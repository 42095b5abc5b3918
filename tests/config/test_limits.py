"""Every number of a recipe has a most: a value that fits 64 bits does not make a plan that never ends."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Le, Lt
from pydantic import BaseModel

from ratoon.cli.main import main
from ratoon.config import Recipe
from ratoon.config.loading import load_recipe
from ratoon.types.errors import UserError

CHECKED_BY_A_VALIDATOR = {"trainer.num_processes"}
"""Beside a word: a bound of the field would be asked of the word too."""

ONLY_COMPARED = {
    "evaluation.pass_threshold", "rollout.server.max_probe_gap", "rollout.vllm.max_probe_gap", "stop.max_kl_old",
    "stop.max_kl_ref", "stop.min_entropy", "trainer.max_grad_norm",
}  # fmt: skip

RECIPE = """
run.name = "r"
model.fresh = { hidden_size = 32, max_positions = 64 }
data = { source = "reasoning-gym:chain_sum", size = 10 }
reward.function = "reasoning-gym"
trainer.device = "cpu"
"""


def number_fields(wanted: type, model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for name, field in model.model_fields.items():
        for kind, metadata in leaves(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from number_fields(wanted, kind, f"{prefix}{name}.")
            elif kind is wanted:
                yield prefix + name, [*metadata, *field.metadata]


def leaves(annotation: Any) -> Iterator[tuple[Any, list[Any]]]:
    if get_origin(annotation) is Literal:
        return
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from ((kind, [*metadata, *more]) for kind, more in leaves(inner))
    elif arguments := get_args(annotation):
        for argument in arguments:
            yield from leaves(argument)
    else:
        yield annotation, []


def recipe_file(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_every_integer_of_a_recipe_has_an_upper_bound():
    fields = dict(number_fields(int))
    assert {"rollout.group_size", "data.sources.size", "model.fresh.num_layers"} <= fields.keys()
    unbounded = {key for key, metadata in fields.items() if not any(isinstance(each, Le | Lt) for each in metadata)}
    assert unbounded == CHECKED_BY_A_VALIDATOR


def test_every_number_of_a_recipe_that_is_reckoned_with_has_an_upper_bound(tmp_path: Path):
    """1e38 is no float32 any more once it is doubled, and 1e308 no float64."""
    fields = dict(number_fields(float))
    unbounded = {key for key, metadata in fields.items() if not any(isinstance(each, Le | Lt) for each in metadata)}
    assert unbounded == ONLY_COMPARED | {"trainer.betas", "model.lora.dropout"}  # which validators bound
    path = recipe_file(tmp_path)
    for key in ("trainer.learning_rate", "algorithm.clip_high", "algorithm.kl_coefficient"):
        with pytest.raises(UserError, match=rf"{key} = 1e\+38: .*at most 1000000\b"):
            load_recipe(path, [f"--{key}=1e38"])


@pytest.mark.parametrize(
    ("key", "most"),
    [("trainer.num_processes", 1_024), ("rollout.group_size", 65_536), ("model.fresh.num_layers", 512)],
)
def test_a_greater_one_is_refused_with_the_most_there_may_be(tmp_path: Path, key: str, most: int):
    path = recipe_file(tmp_path)
    load_recipe(path, [f"--{key}={most}", "--rollout.prompts_per_step=1"])
    for value in (most + 1, 2**62, 2**63 - 1):
        with pytest.raises(UserError, match=rf"{key} = {value}: .*at most {most}\b"):
            load_recipe(path, [f"--{key}={value}"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["--rollout.prompts_per_step=4096", "--rollout.group_size=64"],
            r"rollout\.prompts_per_step = 4096 times rollout\.group_size = 64 is 262,144 responses, and a step may "
            r"have 131,072; lower one of them",
        ),
        (
            ["--data.num_heldout=65536", "--evaluation.group_size=64"],
            r"data\.num_heldout = 65536 times evaluation\.group_size = 64 is 4,194,304 answers, and an evaluation may "
            r"have 1,048,576; lower one of them",
        ),
    ],
)
def test_two_counts_that_multiply_are_bounded_together(tmp_path: Path, overrides: list[str], words: str):
    with pytest.raises(UserError, match=words):
        load_recipe(recipe_file(tmp_path), overrides)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_huge_values_are_refused_at_once(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]):
    path, began = str(recipe_file(tmp_path)), time.monotonic()
    assert main([command, path, "--rollout.group_size=9223372036854775807"]) == 2
    assert main([command, path, "--rollout.max_concurrent_responses=9223372036854775807"]) == 2
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err.count("at most 65536") == 2
