"""Files of a run's folder that were lost, or are not what the run made them."""

import os
import shutil
from pathlib import Path

import pytest
from tests.loop.tiny_run import TinyRun, metrics_rows, write_tiny_recipe

from ratoon.config.loading import load_recipe
from ratoon.config.recipe import Recipe
from ratoon.loop.run_folder import open_run_folder
from ratoon.loop.run_state import peek_run_folder
from ratoon.types.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_tiny_recipe(tmp_path)
    return load_recipe(tmp_path / "recipe.toml")


@pytest.fixture
def run_dir(recipe: Recipe) -> Path:
    """Of a run that has begun."""
    with open_run_folder(recipe, fresh=False) as folder:
        folder.store_origin(Path("/somewhere"))
        for made in (folder.rollouts, folder.checkpoints / "step-000000"):
            made.mkdir(parents=True)
        return folder.path


WRONG = {
    "lock": "pipe", "recipe.toml": "pipe", "origin.json": "folder", "metrics.jsonl": "pipe", "run.log": "pipe",
    "rewards.log": "pipe", "reference.sha256": "folder", "checkpoints": "file", "rollouts": "file",
    "reference": "file", "rollouts/step-000009.parquet": "folder", "checkpoints/step-000000/manifest.json": "pipe",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_file_of_a_run_is_named_before_anything_is_opened(recipe: Recipe, run_dir: Path, name: str):
    """A pipe would be waited for; a file in the place of a folder would end the run after its first step."""
    path = run_dir / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    match WRONG[name]:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.write_text("")
    with pytest.raises(UserError, match=f"runs/tiny/{name} is a .*{WRONG[name]}, and .* move it away, or .*--fresh"):
        open_run_folder(recipe, fresh=False)
    found = peek_run_folder(recipe, has_heldout=True)
    assert (found.status, f"runs/tiny/{name} is a" in str(found.problem)) == ("unusable", True)
    with open_run_folder(recipe, fresh=True) as folder:
        assert folder.set_aside is not None


def test_origin_that_is_no_text_is_written_anew(recipe: Recipe, run_dir: Path):
    (run_dir / "origin.json").write_bytes(b"\xff\xfe")
    with open_run_folder(recipe, fresh=False) as folder:
        folder.store_origin(Path("/elsewhere"))
    assert (run_dir / "origin.json").read_text() == '{"recipe_dir": "/elsewhere"}\n'


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_lost_metrics_are_warned_of_and_the_run_goes_on(tiny: TinyRun, how: str):
    assert "lacks the rows" not in tiny.train("--trainer.num_steps=2").out
    metrics = tiny.run_dir / "metrics.jsonl"
    metrics.unlink() if how == "removed" else metrics.write_text("")
    outcome = tiny.train("--trainer.num_steps=3")
    assert (outcome.status, outcome.err) == (0, "")
    warning = "metrics.jsonl lacks the rows of 2 of the 2 steps done, up to step 2"
    assert outcome.out.count(warning) == 1
    assert (tiny.run_dir / "run.log").read_text().count(warning) == 1
    assert [row["step"] for row in metrics_rows(tiny.run_dir, "train")] == [3]


def test_rows_lost_in_the_middle_are_warned_of(tiny: TinyRun):
    tiny.train("--trainer.num_steps=3")
    metrics = tiny.run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"step": 2, "phase": "train"' not in line))
    assert "lacks the rows of 1 of the 3 steps done, up to step 2" in tiny.train("--trainer.num_steps=3").out


def test_a_log_may_be_thrown_away(tiny: TinyRun):
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / "run.log").symlink_to("/dev/null")
    assert tiny.train("--trainer.num_steps=1").status == 0
