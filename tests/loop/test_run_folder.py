"""Who holds a run's folder, and which recipe it follows."""

import os
import shutil
import time
from pathlib import Path

import pytest
from tests.loop.tiny_run import write_tiny_recipe

from ratoon.config.loading import load_recipe
from ratoon.config.recipe import Recipe
from ratoon.loop.run_folder import open_run_folder
from ratoon.types.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_tiny_recipe(tmp_path)
    return load_recipe(tmp_path / "recipe.toml")


def test_folder_is_held_until_closed(recipe: Recipe):
    with open_run_folder(recipe, fresh=False) as folder:
        for fresh in (False, True):
            with pytest.raises(UserError, match="held by another process"):
                open_run_folder(recipe, fresh=fresh)
        assert (folder.path / "lock").read_text().strip().isdigit()
    with open_run_folder(recipe, fresh=False):
        pass


def test_refusal_frees_the_folder(recipe: Recipe):
    with open_run_folder(recipe, fresh=False):
        pass
    other = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": 5})})
    with pytest.raises(UserError, match=r"changed: run\.seed"):
        open_run_folder(other, fresh=False)
    with open_run_folder(recipe, fresh=False):
        pass


def test_what_vllm_takes_of_the_machine_may_change_and_what_it_draws_may_not(tmp_path: Path):
    """A run that ran out of memory goes on with a smaller share."""
    write_tiny_recipe(tmp_path)
    given = ["--rollout.engine=vllm", "--rollout.vllm.gpu_memory_utilization=0.4", "--rollout.vllm.sleep=0"]
    with open_run_folder(load_recipe(tmp_path / "recipe.toml", given), fresh=False):
        pass
    smaller = ["--rollout.engine=vllm", "--rollout.vllm.gpu_memory_utilization=0.3", "--rollout.vllm.sleep=2"]
    with open_run_folder(load_recipe(tmp_path / "recipe.toml", smaller), fresh=False):
        pass
    other = load_recipe(tmp_path / "recipe.toml", [*smaller, "--rollout.vllm.dtype=float32"])
    with pytest.raises(UserError, match=r"changed: rollout\.vllm\.dtype"):
        open_run_folder(other, fresh=False)


@pytest.mark.parametrize(
    "smaller",
    [
        "--planner.max_rows_per_microbatch=400",
        "--planner.share_prompts=false",
        "--model.compile=none",
        "--model.recompute=full",
    ],
)
def test_a_run_that_ran_out_of_memory_goes_on_with_what_takes_less(tmp_path: Path, smaller: str):
    write_tiny_recipe(tmp_path)
    for given in ([], [smaller]):
        with open_run_folder(load_recipe(tmp_path / "recipe.toml", given), fresh=False):
            pass


def test_engines_that_draw_the_same_may_change_and_others_may_not(tmp_path: Path):
    """A run of a recipe that named no engine goes on where `auto` is another: on a GPU, or in a later version."""
    write_tiny_recipe(tmp_path)

    def follows(engine: str) -> None:
        with open_run_folder(load_recipe(tmp_path / "recipe.toml", [f"--rollout.engine={engine}"]), fresh=False):
            pass

    for engine in ("transformers", "auto", "paged", "transformers"):
        follows(engine)
    with pytest.raises(UserError, match=r"changed: rollout\.engine\."):
        follows("vllm")


def test_stored_recipe_is_the_resolved_one(recipe: Recipe):
    with open_run_folder(recipe, fresh=False) as folder:
        assert load_recipe(folder.path / "recipe.toml") == recipe
        assert not [path for path in folder.path.iterdir() if "partial" in path.name]


def test_fresh_without_an_old_run_is_a_new_run(recipe: Recipe):
    with open_run_folder(recipe, fresh=True) as folder:
        assert [path.name for path in folder.path.parent.iterdir()] == ["tiny"]


def test_fresh_sets_aside_under_the_next_free_name(recipe: Recipe):
    for count in (1, 2, 3):
        with open_run_folder(recipe, fresh=True) as folder:
            (folder.path / f"mark-{count}").write_text("")
    parent = folder.path.parent
    assert sorted(path.name for path in parent.iterdir()) == ["tiny", "tiny.1", "tiny.2"]
    assert (parent / "tiny.1" / "mark-1").exists()
    assert (parent / "tiny.2" / "mark-2").exists()


def test_rollouts_after_a_step_are_removed(recipe: Recipe):
    with open_run_folder(recipe, fresh=False) as folder:
        folder.remove_rollouts_after(0)  # no folder yet
        folder.rollouts.mkdir()
        own = ["notes.txt", "step-x.parquet", "step-12.parquet", "step-000011.copy.parquet", "summary.parquet"]
        steps = (1, 9, 10, 999_999, 1_000_000, 1_000_001)
        tables = {step: f"step-{step:06d}.parquet" for step in steps}
        for name in (*own, *tables.values()):
            (folder.rollouts / name).write_text("")
        for last in (1_000_000, 9):  # as text, step-1000001 comes before step-999999
            folder.remove_rollouts_after(last)
            left = {path.name for path in folder.rollouts.iterdir()}
            assert left == {*own, *(name for step, name in tables.items() if step <= last)}


def test_home_is_expanded(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    at_home = recipe.model_copy(update={"run": recipe.run.model_copy(update={"output_dir": "~/runs"})})
    with open_run_folder(at_home, fresh=False) as folder:
        assert folder.path == tmp_path / "home" / "runs" / "tiny"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_worker_does_not_hold_the_folder(recipe: Recipe):
    reader, writer = os.pipe()
    folder = open_run_folder(recipe, fresh=False)
    worker = os.fork()
    if worker == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test is over
        os._exit(0)
    folder.lock.close()
    deadline = time.monotonic() + 10
    try:
        while True:
            try:
                open_run_folder(recipe, fresh=False).lock.close()
                break
            except UserError:
                assert time.monotonic() < deadline, "the worker holds the folder"
                time.sleep(0.01)  # it may not have begun yet
    finally:
        os.close(writer)
        os.waitpid(worker, 0)
        os.close(reader)


def test_home_of_nobody_is_refused_by_name(recipe: Recipe):
    nowhere = recipe.model_copy(update={"run": recipe.run.model_copy(update={"output_dir": "~nouser/runs"})})
    with pytest.raises(UserError, match=r"run\.output_dir = '~nouser/runs'"):
        open_run_folder(nowhere, fresh=False)


def test_copied_folder_goes_on_under_its_new_name(recipe: Recipe):
    with open_run_folder(recipe, fresh=False) as folder:
        shutil.copytree(folder.path, folder.path.with_name("copy"))
    copied = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": "copy"})})
    with open_run_folder(copied, fresh=False) as folder:
        assert folder.path.name == "copy"
