"""The warm-started model that a KL penalty is measured against, in the run's folder."""

import shutil
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from tests.loop.run_process import cost, start
from tests.loop.tiny_run import VARIANTS, TinyRun, metrics_rows, snapshot, traces, write_tiny_recipe
from tests.sampling import sampled

from ratoon.trainer.export import export_checkpoint

PENALTY = "--algorithm.kl_coefficient=0.1"


def flip_a_bit(reference: Path) -> None:
    weights = reference / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-40] ^= 0x40
    weights.write_bytes(changed)


def cut(reference: Path) -> None:
    weights = reference / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "it is gone"),
    "a bit": (flip_a_bit, "model.safetensors has other contents than were written"),
    "cut short": (cut, "model.safetensors has "),
    "no config": (lambda reference: (reference / "config.json").unlink(), "config.json is missing"),
    "no manifest": (lambda reference: (reference / "manifest.json").unlink(), "it has no manifest.json"),
}


@pytest.mark.parametrize("damage", sampled(*DAMAGES, keep=2))
def test_damaged_reference_ends_the_resumed_run_by_name(tiny: TinyRun, damage: str):
    """Weights of which one bit differs load, and would train another policy unseen."""
    assert tiny.train(PENALTY, "--trainer.num_steps=2").status == 0
    act, sentence = DAMAGES[damage]
    act(tiny.run_dir / "reference")
    before = snapshot(tiny.run_dir / "checkpoints")
    outcome = tiny.train(PENALTY)
    assert outcome.status == 2 and "Traceback" not in outcome.err
    assert f"{tiny.run_dir}/reference, the warm-started model" in outcome.err
    assert sentence in outcome.err and "--fresh" in outcome.err
    assert snapshot(tiny.run_dir / "checkpoints") == before


@pytest.mark.parametrize("is_changed", sampled(True, False))
def test_changed_model_folder_is_no_reference_any_more(tiny: TinyRun, is_changed: bool):
    """Without a warm start the reference is read from `model.path` again; other weights there would act unseen."""
    assert tiny.train("--trainer.num_steps=0").status == 0
    model = tiny.recipe.with_name("model")
    export_checkpoint(tiny.run_dir, model)
    recipe = tiny.recipe.read_text()
    before, after = recipe.partition("[model.fresh]")[0], recipe.partition("[data]")[2]
    data = after.partition("[sft]")[0] + "[rollout]" + after.partition("[rollout]")[2]
    tiny.recipe.write_text(f'{before}[model]\npath = "{model}"\n[data]{data}')
    command = (PENALTY, "--run.name=named")
    assert tiny.train(*command, "--trainer.num_steps=2").status == 0
    if is_changed:
        flip_a_bit(model)
    outcome = tiny.train(*command, "--trainer.num_steps=3")
    assert outcome.status == (2 if is_changed else 0)
    assert ("is not as it was then" in outcome.err) == is_changed


@pytest.mark.parametrize("arguments", [[], ["--model.lora.rank=2"]], ids=["whole model", "adapters"])
def test_reference_is_the_policy_as_reinforcement_learning_begins(tiny: TinyRun, arguments: list[str]):
    """With adapters too: switched off, they would pull the policy back to where its warm start began."""
    tiny.edit(("num_steps = 3", "num_steps = 20"))
    assert tiny.train(PENALTY, *arguments, "--trainer.num_steps=3").status == 0
    first, *others = (row["kl_ref_mean"] for row in metrics_rows(tiny.run_dir, "train"))
    assert first == pytest.approx(0, abs=1e-10)
    assert all(kl > 1e-9 for kl in others)


@pytest.mark.parametrize("share", sampled(0.5, 0.0, 0.2, 0.8, 1.0, keep=0))
def test_killed_while_the_reference_is_written(
    tiny: TinyRun,
    forks: ForkServerContext,
    undisturbed_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    share: float,
):
    arguments = VARIANTS["everything at once"]
    whole = TinyRun(tmp_path_factory.mktemp("whole"), tiny.main)
    write_tiny_recipe(whole.folder)
    start(forks, whole, *arguments).join(timeout=120)
    touches = [number for number, (_, path) in enumerate(cost(whole)[1]) if "reference" in path]
    process = start(forks, tiny, *arguments, die_at_touch=touches[round(share * (len(touches) - 1))])
    process.join(timeout=120)
    assert process.exitcode == -9, (tiny.folder / "output").read_text()
    outcome = tiny.train(*arguments)
    assert (outcome.status, outcome.err) == (0, "")
    undisturbed = undisturbed_of("everything at once")
    assert traces(tiny.run_dir) == traces(undisturbed)
    assert {path.name for path in tiny.run_dir.iterdir()} == {path.name for path in undisturbed.iterdir()}
