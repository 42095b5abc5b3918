"""`ratoon train` on two GPUs, sharded over NCCL, against one."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.loop.test_several_ranks import drawn, figures
from tests.loop.tiny_run import TinyRun, metrics_rows, write_tiny_recipe

pytestmark = pytest.mark.gpu


def run_command(recipe: Path, *arguments: str) -> str:
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "ratoon.cli.main",
            "train",
            str(recipe),
            "--trainer.device=cuda",
            *([] if any("compile" in argument for argument in arguments) else ["--model.compile=none"]),
            *arguments,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path]), "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_train_as_one_and_each_resumes_the_other(tiny: TinyRun, tmp_path: Path, dtype: str):
    two_gpus()
    (tmp_path / "one").mkdir()
    write_tiny_recipe(tmp_path / "one")
    short = (f"--model.dtype={dtype}", "--trainer.num_steps=2", "--algorithm.kl_coefficient=0.1")
    run_command(tmp_path / "one" / "recipe.toml", *short, "--trainer.num_processes=1")
    said = run_command(tiny.recipe, *short)
    assert "2 processes train together: each holds a part" in said
    one = tmp_path / "one" / "runs" / "tiny"
    first = "step-000001.parquet"
    if dtype == "float32":
        assert drawn(tiny.run_dir)[first] == drawn(one)[first]
        for mine, other in zip(figures(tiny.run_dir)[:3], figures(one)[:3], strict=True):  # the warm start
            assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
    assert all(math.isfinite(row["loss"]) for row in metrics_rows(tiny.run_dir, "train"))
    said = run_command(tiny.recipe, *short[::2], "--trainer.num_steps=4", "--trainer.num_processes=1")
    assert "resuming after step 2" in said and "processes train together" not in said
    said = run_command(tiny.recipe, *short[::2], "--trainer.num_steps=5")
    assert "resuming after step 4" in said and "2 processes train together" in said


@pytest.mark.parametrize(
    "settings",
    [("--trainer.sharding=full",), ("--trainer.sharding=none",), ("--model.lora.rank=2",), ("--model.compile=layers",)],
)
def test_two_gpus_hold_each_microbatch_together(tiny: TinyRun, tmp_path: Path, settings: tuple[str, ...]):
    two_gpus()
    (tmp_path / "one").mkdir()
    write_tiny_recipe(tmp_path / "one")
    settings = (*settings, "--trainer.num_steps=2", "--algorithm.kl_coefficient=0.1")
    run_command(tmp_path / "one" / "recipe.toml", *settings, "--trainer.num_processes=1")
    said = run_command(tiny.recipe, *settings, "--trainer.sequence_parallel=2")
    assert "2 processes train together: 1 data rank x 2 sequence ranks; each holds" in said
    one = tmp_path / "one" / "runs" / "tiny"
    for mine, other in zip(figures(tiny.run_dir)[:3], figures(one)[:3], strict=True):  # the warm start
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-3)
    train, train_of_one = (metrics_rows(run_dir, "train") for run_dir in (tiny.run_dir, one))
    assert [row["num_microbatches"] for row in train] == [row["num_microbatches"] for row in train_of_one]
    assert all(math.isfinite(row["loss"]) for row in train)
    said = run_command(tiny.recipe, settings[0], "--algorithm.kl_coefficient=0.1", "--trainer.num_steps=3")
    assert "resuming after step 2" in said and "sequence ranks" not in said


def test_adapters_on_two_gpus(tiny: TinyRun):
    two_gpus()
    said = run_command(tiny.recipe, "--trainer.num_steps=2", "--model.lora.rank=2", "--algorithm.kl_coefficient=0.1")
    assert "2 processes train together: each holds all weights" in said
