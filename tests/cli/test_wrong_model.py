"""A wrong model folder ends `ratoon train` in one paragraph and status 2, before any weight is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.test_wrong_recipe import ROWS, assert_one_paragraph
from transformers import BertConfig, MambaConfig, PreTrainedConfig, PreTrainedModel, Qwen2VLConfig, T5Config

from ratoon.cli.main import main
from ratoon.models import FreshModelConfig, build_fresh

SMALL = FreshModelConfig(
    hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, alphabet="abc"
)
RECIPE = """\
run = {{ name = "r", output_dir = "{folder}/runs" }}
model.path = "{folder}/model"
data = {{ source = "rows.jsonl", chat_template = false }}
rollout.max_response_tokens = 8
reward.function = "exact-match"
trainer = {{ num_steps = 1, device = "cpu" }}
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A good model folder, beside a recipe that names it and good data."""
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model, tokenizer = build_fresh(SMALL, seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def refused(model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The paragraph that `ratoon train` ends with; loading a model or opening a run folder is a failure."""

    def call(*overrides: str) -> str:
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
        assert main(["train", str(model_dir.parent / "recipe.toml"), *overrides]) == 2
        text = capsys.readouterr().err
        assert_one_paragraph(text)
        assert not (model_dir.parent / "runs").exists()
        return text

    return call


def rewrite(file: Path, **changed: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def truncate(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def clear(folder: Path, pattern: str = "*") -> None:
    for file in folder.glob(pattern):
        file.unlink()


def index_absent_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def remove_model(folder: Path) -> None:
    clear(folder)
    folder.rmdir()


def take_eos(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def enlarge_tokenizer(folder: Path) -> None:
    build_fresh(SMALL.model_copy(update={"alphabet": "abcdefgh"}), seed=0)[1].save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_model, ["model'", "does not exist", "check model.path"]),
        (clear, ["has no config.json", "point model.path at the folder"]),
        (lambda folder: truncate(folder, 40), ["model.safetensors'", "is truncated", "fetch it again"]),
        (lambda folder: truncate(folder, -9), ["model.safetensors'", "is truncated or damaged: it holds"]),
        (index_absent_shard, ["model-00002-of-00002.safetensors'", "is missing"]),
        (lambda folder: clear(folder, "*.safetensors"), ["holds no weights (*.safetensors)"]),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
         ["pickled (pytorch_model.bin)", "convert them to safetensors"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json' is not valid JSON"]),
        (lambda folder: rewrite(folder / "config.json", hidden_size="wide"), ["hidden_size", "cannot be loaded"]),
        (lambda folder: rewrite(folder / "config.json", model_type="homemade"), ["'homemade'", "trust_remote_code"]),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), ["holds an adapter", "ratoon export"]),
        (lambda folder: clear(folder, "tokenizer*"), ["holds no tokenizer (tokenizer.json"]),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), ["the tokenizer in", "cannot be loaded"]),
        (take_eos, ["no end-of-sequence token", "model.eos_token"]),
        (enlarge_tokenizer, ["the tokenizer has 11 tokens, and the model's vocabulary 6", "of the same model?"]),
    ],
    ids=["absent", "empty", "header cut", "data cut", "shard", "no weights", "pickle", "json", "sizes", "unknown type",
         "adapter", "no tokenizer", "broken tokenizer", "no eos", "vocabulary"],
)  # fmt: skip
def test_a_folder_that_will_not_do(
    spoil: Callable[[Path], object], words: list[str], model_dir: Path, refused: Callable[..., str]
):
    spoil(model_dir)
    text = refused()
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (T5Config(), ["'t5' cannot be trained on shared prompts", "encoder-decoder", "use a decoder-only model"]),
        (BertConfig(), ["'bert'", "it is an encoder"]),
        (Qwen2VLConfig(), ["'qwen2_vl'", "multimodal (vision_config)"]),
        (MambaConfig(), ["'mamba'", "recurrence or convolution"]),
    ],
    ids=["t5", "bert", "qwen2_vl", "mamba"],
)
def test_another_kind_of_model(
    config: PreTrainedConfig, words: list[str], model_dir: Path, refused: Callable[..., str]
):
    config.save_pretrained(model_dir)
    save_file({"weight": torch.zeros(2)}, model_dir / "model.safetensors", metadata={"format": "pt"})
    text = refused()
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--data.chat_template=true"], ["this tokenizer has no chat template", "data.chat_template = false"]),
        (["--model.gguf_file=x.gguf"], ["model.gguf_file 'x.gguf' is not in"]),
        (["--model.eos_token=<end>"], ["model.eos_token '<end>' is not a token"]),
        (["--model.lora.rank=0"], ["model.lora.rank = 0"]),
        (["--model.lora.dropout=0.05"], ["model.lora.dropout = 0.05", "log-probs that the loss sees random"]),
        (["--model.lora.target_modules=['lm_head']"], ["model.lora.target_modules: 'lm_head' is the output head"]),
        (["--model.lora.target_modules=['query']"], ["'query' names no layer", "that can: q_proj, k_proj"]),
        (["--model.lora.target_modules=[]"], ["model.lora.target_modules", "names no layer"]),
    ],
)
def test_a_model_table_that_does_not_fit_the_folder(
    overrides: list[str], words: list[str], refused: Callable[..., str]
):
    text = refused(*overrides)
    for word in words:
        assert word in text


def test_peft_is_not_installed(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ratoon.models.adapters.find_spec", lambda name: None)
    assert 'model.lora needs the peft package: pip install -e ".[lora]"' in refused("--model.lora.rank=8")
