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
from peft import PeftModel
from tests.trainer.tiny_policy import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as Model

from ratoon.cli.main import main
from ratoon.models import LoraConfig, ModelConfig, align_eos, attach, build_policy, stock_attention
from ratoon.models.config import Dtype
from ratoon.trainer.checkpoint import checkpoint_step, save_checkpoint
from ratoon.trainer.export import AdapterExport, export_checkpoint
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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float):
    model = tiny_model(dtype=torch.bfloat16)
    save(tmp_path / "run", 3, model)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[2, 3] = value
    spoilt = save(tmp_path / "run", 4, model)
    with pytest.raises(
        UserError, match=r"step-000004 cannot be exported: .* in 1 of its tensors, first model.layers.1"
    ):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_to(spoilt.with_name("step-000003"), tmp_path / "out")


@pytest.mark.parametrize("out", ["checkpoints/step-000099", "checkpoints/a/b", "checkpoints/step-000001/model"])
def test_an_export_among_the_checkpoints_is_refused(tmp_path: Path, out: str):
    save(tmp_path, 1, tiny_model())
    with pytest.raises(UserError, match="among the checkpoints of a run"):
        export_checkpoint(tmp_path, tmp_path / out)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000001"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a base model."""
    tiny_model(seed=5).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def save_adapted(run_dir: Path, base: Path, dtype: Dtype = "float32") -> Model:
    """A checkpoint of a policy whose adapters have moved; returns the policy."""
    model = build_policy(ModelConfig(path=str(base), dtype=dtype, lora=LoraConfig(rank=2, alpha=4)), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    align_eos(model, tiny_tokenizer())
    save(run_dir, 1, model)
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[2, 3, 11, 7]])).logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_into_an_ordinary_model(tmp_path: Path, base: Path, dtype: Dtype):
    policy = save_adapted(tmp_path / "run", base, dtype)
    exported = export_to(tmp_path / "run", tmp_path / "out")
    assert not list(exported.glob("adapter*")) and not (exported / "base_model.json").exists()
    loaded = load(exported)
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(exported)("abj")["input_ids"] == [2, 3, 11]
    ulp = {"float32": 2**-23, "bfloat16": 2**-7}[dtype]
    own, before = policy.state_dict(), load(base).to(loaded.dtype).state_dict()
    for name, weight in loaded.state_dict().items():
        expected = before[name].double()
        layer = name.removesuffix(".weight")
        if f"{layer}.base_layer.weight" in own:
            A, B = (own[f"{layer}.lora_{which}.default.weight"].double() for which in "AB")
            change = 2.0 * B @ A  # alpha / rank
            assert change.abs().max() > 0.1, "the adapters must show"
            expected = expected + change
        # The product is rounded, and the sum; terms of the product may cancel.
        torch.testing.assert_close(weight.double(), expected, rtol=2 * ulp, atol=ulp / 4, msg=name)


def test_adapters_alone(tmp_path: Path, base: Path):
    policy = save_adapted(tmp_path / "run", base)
    export_checkpoint(tmp_path / "run", tmp_path / "out", adapters=AdapterExport(is_merged=False))
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(os.listdir(tmp_path / "out"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    stock = PeftModel.from_pretrained(load(base), tmp_path / "out")
    with stock_attention(policy, "sdpa"):
        torch.testing.assert_close(logits_of(stock), logits_of(policy), rtol=0, atol=1e-6)


def test_a_checkpoint_of_adapters_is_small(tmp_path: Path, base: Path):
    policy = save_adapted(tmp_path / "run", base)
    reckoned = model_file_bytes(policy) - model_file_bytes(torch.nn.Identity())
    num_trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert reckoned == 4 * num_trained
    written = (tmp_path / "run" / "checkpoints" / "step-000001" / "adapter_model.safetensors").stat().st_size
    assert reckoned <= written <= reckoned + 8_192


def test_a_base_that_is_gone_or_moved(tmp_path: Path, base: Path):
    save_adapted(tmp_path / "run", base)
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"step-000001 cannot be merged .*base' does not exist.*--base.*--adapter"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial*"))
    export_checkpoint(tmp_path / "run", tmp_path / "out", adapters=AdapterExport(base_path=str(tmp_path / "elsewhere")))
    load(tmp_path / "out")
    tiny_model(seed=6).save_pretrained(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"elsewhere' are not those that the adapter was trained on"):
        export_checkpoint(
            tmp_path / "run", tmp_path / "other", adapters=AdapterExport(base_path=str(tmp_path / "elsewhere"))
        )


def test_whole_models_have_no_adapters_to_export(tmp_path: Path):
    save(tmp_path, 1, tiny_model())
    with pytest.raises(UserError, match=r"holds a whole model and no adapters, .*without --adapter"):
        export_checkpoint(tmp_path, tmp_path / "out", adapters=AdapterExport(is_merged=False))


def test_the_command(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]):
    save_adapted(tmp_path / "run", base)
    run = str(tmp_path / "run")
    assert main(["export", run, str(tmp_path / "merged")]) == 0
    assert "AutoModelForCausalLM.from_pretrained(" in capsys.readouterr().out
    assert main(["export", run, str(tmp_path / "adapter"), "--adapter"]) == 0
    assert "PeftModel.from_pretrained(BASE, " in capsys.readouterr().out
    assert main(["export", run, str(tmp_path / "other"), "--adapter", "--base", str(base)]) == 2
    assert "--adapter writes the adapters alone" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged", "run"]
