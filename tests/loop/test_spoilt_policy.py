"""A policy that its updates have spoilt ends the run by name: it is not saved, and good checkpoints stay."""

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.loop.several_ranks import start_ranks
from tests.loop.tiny_run import TinyRun, metrics_rows

import ratoon.loop.synchronous as synchronous
from ratoon.rollout.engines.transformers import TransformersEngine
from ratoon.rollout.errors import NonFiniteLogitsError
from ratoon.trainer import Trainer
from ratoon.trainer.checkpoint import MANIFEST, checkpoint_name, write_manifest

WEIGHT = "model.layers.0.mlp.up_proj.weight"
SHORT = ("--sft.num_steps=1", "--trainer.keep_checkpoints=1")
SPOILING = ("--model.dtype=float16", "--trainer.learning_rate=1e6")


def checkpoints(tiny: TinyRun) -> list[str]:
    return sorted(path.name for path in (tiny.run_dir / "checkpoints").iterdir())


def spoil(step: int, act: Callable[[Any], None], patch: pytest.MonkeyPatch) -> None:
    """`act` on the model at the end of the update of `step`, counted from 1."""
    update, num_done = Trainer.step, [0]

    def spoiling(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        result = update(self, *arguments, **keywords)
        num_done[0] += 1
        if num_done[0] == step:
            with torch.no_grad():
                act(self.model)
        return result

    patch.setattr(Trainer, "step", spoiling)


def nan_weight(model: Any) -> None:
    model.get_parameter(WEIGHT)[0, 0] = float("nan")


def overflow(model: Any) -> None:
    model.model.norm.weight.fill_(3e38)


SPOILS = {"weights": nan_weight, "logits": overflow}
SAID = {
    "weights": f"has weights that are NaN or infinite, in 1 of its tensors, first {WEIGHT}",
    "logits": "has finite weights, and logits that are not: it overflows in torch.float32",
}


@pytest.mark.parametrize("kind", SPOILS)
@pytest.mark.parametrize("step", [2, 3])
def test_a_spoilt_policy_is_not_saved(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, kind: str, step: int):
    """By the last update (3) too, after which nobody draws from it; and with held-out prompts, which would."""
    spoil(step, SPOILS[kind], monkeypatch)
    failed = tiny.train(*SHORT, "--trainer.num_steps=3", "--trainer.checkpoint_every_steps=1")
    assert failed.status == 1
    assert f"SpoiltPolicyError: the policy after step {step} {SAID[kind]}; it was not saved, and the last good " in (
        failed.err
    )
    assert checkpoints(tiny) == [checkpoint_name(step - 1)]
    monkeypatch.undo()
    resumed = tiny.train(*SHORT, "--trainer.num_steps=3", "--trainer.checkpoint_every_steps=1")
    assert (resumed.status, resumed.err) == (0, "")
    assert f"resuming after step {step - 1}" in resumed.out


@pytest.mark.parametrize("kind", SPOILS)
def test_a_failing_rollout_does_not_save_what_made_it_fail(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, kind: str):
    spoil(2, SPOILS[kind], monkeypatch)
    failed = tiny.train(*SHORT, "--trainer.checkpoint_every_steps=9")
    assert failed.status == 1
    assert "NonFiniteLogitsError: the model's logits are not finite" in failed.err
    assert "warning: the policy after step 2 is what failed; it was not saved, and the last good" in failed.out
    assert checkpoints(tiny) == [checkpoint_name(0)]


def test_other_failures_do_not_save_a_spoilt_policy_either(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    async def explode(*_: object, **__: object) -> None:
        raise RuntimeError("the cache is on fire")

    def spoil_and_explode(model: Any) -> None:
        nan_weight(model)
        monkeypatch.setattr(TransformersEngine, "generate", explode)

    spoil(1, spoil_and_explode, monkeypatch)
    failed = tiny.train(*SHORT, "--trainer.checkpoint_every_steps=9")
    assert "RuntimeError: the cache is on fire" in failed.err
    assert f"warning: the policy after step 1 {SAID['weights']}" in failed.out
    assert checkpoints(tiny) == [checkpoint_name(0)]


def test_a_saved_policy_that_fails_for_other_prompts_is_named(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    generate = TransformersEngine.generate

    async def fail(self: Any, prompt: Any, *, step: int, **others: Any) -> Any:
        if step == 1:
            raise NonFiniteLogitsError("logits")
        return await generate(self, prompt, step=step, **others)

    monkeypatch.setattr(TransformersEngine, "generate", fail)
    failed = tiny.train(*SHORT, "--trainer.checkpoint_every_steps=1")
    assert failed.status == 1
    where = tiny.run_dir / "checkpoints" / checkpoint_name(1)
    assert f"the policy after step 1 is what failed, and {where} holds it: remove that folder" in failed.out


def test_a_spoilt_warm_start_leaves_no_run(tiny: TinyRun):
    failed = tiny.train("--model.dtype=float16", "--sft.learning_rate=1e6", "--sft.warmup_steps=0", "--sft.num_steps=1")
    assert failed.status == 1
    assert "SpoiltPolicyError: the policy after step 0" in failed.err
    assert checkpoints(tiny) == []


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_a_spoilt_checkpoint_is_refused_by_name(tiny: TinyRun, kind: str):
    arguments = (*SHORT, *(("--model.lora.rank=2",) if kind == "adapters" else ()))
    assert tiny.train(*arguments, "--trainer.num_steps=1").status == 0
    checkpoint = tiny.run_dir / "checkpoints" / checkpoint_name(1)
    (file,) = checkpoint.glob("*.safetensors")
    saved = load_file(file)
    next(iter(saved.values())).view(-1)[0] = float("inf")
    save_file(saved, file, metadata={"format": "pt"})
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, 1)
    refused = tiny.train(*arguments)
    assert refused.status == 2
    assert f"checkpoint {checkpoint} holds a spoilt policy:" in refused.err
    assert "weights that are NaN or infinite, in 1 of its tensors" in refused.err
    assert "Remove that folder" in refused.err


def test_the_check_changes_nothing(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch):
    """Saved after each step, a run gives the metrics of one that is never checked."""
    rows = []
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(synchronous.Soundness, "require", lambda *_, **__: None)
        assert tiny.train(*SHORT, "--fresh", "--trainer.num_steps=3", "--trainer.checkpoint_every_steps=1").status == 0
        (file,) = (tiny.run_dir / "checkpoints" / checkpoint_name(3)).glob("*.safetensors")
        train = metrics_rows(tiny.run_dir, "train")
        rows.append((file.read_bytes(), [(row["loss"], row["reward_mean"], row["grad_norm"]) for row in train]))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("sharding", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_several_ranks_end_together(tiny: TinyRun, forks: ForkServerContext, sharding: str, tmp_path: Path):
    """In the rollout of the second step, and at the saving of the first."""
    for every in (9, 1):
        arguments = (
            *SHORT,
            *SPOILING,
            f"--trainer.sharding={sharding}",
            f"--trainer.checkpoint_every_steps={every}",
        )
        ranks = start_ranks(forks, tiny, *arguments, "--fresh")
        assert ranks.join() == (1, 1), ranks.said()
        assert len(ranks.complaints()) == 1, ranks.said()
        assert "not finite" in ranks.complaints()[0] or "NaN or infinite" in ranks.complaints()[0]
        assert checkpoints(tiny) == [checkpoint_name(0)]
