"""A checkpoint's model, as transformers reads it."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.tiny_policy import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as Model

from ratoon.models import attach
from ratoon.trainer.checkpoint import checkpoint_step, save_checkpoint
from ratoon.trainer.export import export_checkpoint
from ratoon.trainer.model_folder import model_file_bytes, save_model
from ratoon.types import UserError


def save(run_dir: Path, step: int, model: Model) -> Path:
    return save_checkpoint(
        run_dir / "checkpoints",
        step,
        model_writer=lambda folder: save_model(model, tiny_tokenizer(), folder),
        model_bytes=model_file_bytes(model),
        state={"moments": torch.zeros(3)},
        position={"next_prompt": step},
    )


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def export_to(source: Path, out_dir: Path, *, warn: Callable[[str], object] = warnings.warn) -> Path:
    """Exports, checks that the checkpoint it names is one, and returns the new folder."""
    assert checkpoint_step(export_checkpoint(source, out_dir, warn=warn)) is not None
    return out_dir


def assert_same_weights(left: Any, right: Any) -> None:
    weights, others = left.state_dict(), right.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype and torch.equal(weight, others[name]), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_checkpoint_and_export(tmp_path: Path, tied: bool, dtype: torch.dtype):
    model = tiny_model(tied=tied, dtype=dtype)
    checkpoint = save(tmp_path / "run", 3, model)
    exported = export_to(tmp_path / "run", tmp_path / "out" / "model")
    assert exported == tmp_path / "out" / "model"
    for folder in (checkpoint, exported):
        loaded = load(folder)
        assert_same_weights(loaded, model)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert tokenizer("abj")["input_ids"] == tiny_tokenizer()("abj")["input_ids"] == [2, 3, 11]
        assert tokenizer.eos_token_id == 1
    assert {"trainer_state", "manifest.json"}.isdisjoint(os.listdir(exported))
    assert os.listdir(tmp_path / "out") == ["model"]


def test_the_attention_in_use_is_not_recorded(tmp_path: Path):
    model = attach(tiny_model())
    save(tmp_path, 1, model)
    exported = export_to(tmp_path, tmp_path / "out")
    for path in exported.glob("*.json"):
        assert "ratoon" not in path.read_text() and "attn_implementation" not in path.read_text()
    assert load(exported).config._attn_implementation != "ratoon"
    assert model.config._attn_implementation == "ratoon", "training goes on as it was"


@pytest.mark.parametrize("tied", [True, False])
def test_the_size_is_reckoned_before_writing(tmp_path: Path, tied: bool):
    model = tiny_model(tied=tied)
    save_model(model, None, tmp_path)
    weights_bytes = model_file_bytes(model) - model_file_bytes(torch.nn.Identity())
    written = (tmp_path / "model.safetensors").stat().st_size
    assert weights_bytes <= written <= weights_bytes + 8_192  # the file's header
    assert not list(tmp_path.glob("tokenizer*"))


def test_the_newest_whole_checkpoint_is_exported(tmp_path: Path):
    old = tiny_model(seed=1)
    save(tmp_path, 9, old)
    newest = save(tmp_path, 10, tiny_model(seed=2))
    os.truncate(newest / "model.safetensors", 100)
    said: list[str] = []
    assert_same_weights(load(export_to(tmp_path, tmp_path / "out", warn=said.append)), old)
    assert len(said) == 1 and "step-000010 is damaged" in said[0]
    with pytest.raises(UserError, match=r"step-000010 is damaged: model.safetensors has 100 bytes"):
        export_checkpoint(newest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_one_checkpoint_can_be_chosen(tmp_path: Path):
    first = tiny_model(seed=1)
    path = save(tmp_path, 1, first)
    save(tmp_path, 2, tiny_model(seed=2))
    (tmp_path / "out").mkdir()  # an empty folder is fine
    assert_same_weights(load(export_to(path, tmp_path / "out")), first)
    assert json.loads((path / "manifest.json").read_text())["step"] == 1


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path):
    save(tmp_path, 1, tiny_model())
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out exists and is not an empty folder"):
        export_checkpoint(tmp_path, out)
    with pytest.raises(UserError, match=r"thesis.txt exists"):
        export_checkpoint(tmp_path, out / "thesis.txt")
    assert os.listdir(out) == ["thesis.txt"] and (out / "thesis.txt").read_text() == "mine"


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"absent is not a folder"):
        export_checkpoint(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "run" / "checkpoints" / ".partial-step-000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run holds no finished checkpoint"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_goes_while_it_is_copied_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that still trains removes its older checkpoints."""
    path = save(tmp_path, 1, tiny_model())
    copy = shutil.copyfile

    def remove_and_copy(source: Path, target: Path) -> None:
        shutil.rmtree(path)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", remove_and_copy)
    with pytest.raises(UserError, match=r"step-000001 was removed while it was copied"):
        export_checkpoint(tmp_path, tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


@pytest.mark.parametrize("out", ["checkpoints/step-000099", "checkpoints/a/b", "checkpoints/step-000001/model"])
def test_an_export_among_the_checkpoints_is_refused(tmp_path: Path, out: str):
    save(tmp_path, 1, tiny_model())
    with pytest.raises(UserError, match="among the checkpoints of a run"):
        export_checkpoint(tmp_path, tmp_path / out)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000001"]
