"""Dataset folders in the two layouts of Hugging Face, and folders that only look like them.

The layouts are those of datasets 5.2: `save_to_disk` and what the hub's repositories hold.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tests.data.reading import read

from ratoon.types import UserError


def save_to_disk(folder: Path, shards: Sequence[Sequence[str]], split: str | None = "train") -> Path:
    """As `Dataset.save_to_disk(folder, num_shards=...)` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{index:05d}-of-{len(shards):05d}.arrow" for index in range(len(shards))]
    for name, prompts in zip(names, shards, strict=True):
        table = pa.table({"prompt": list(prompts), "answer": list(prompts)})
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def put(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"prompt": list(prompts), "answer": list(prompts)}), path)
    elif path.suffix == ".csv":
        path.write_text("prompt,answer\n" + "".join(f"{prompt},x\n" for prompt in prompts))
    else:
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts))
    return path


def prompts_of(folder: Path, split: str | None = None) -> list[str]:
    return [row.last_text for row in read(folder, split=split)]


def test_a_saved_dataset_is_read_shard_after_shard(tmp_path: Path):
    folder = save_to_disk(tmp_path / "sums", [["a", "b"], ["c"]])
    rows = read(folder)
    assert [row.prompt for row in rows] == ["a", "b", "c"]
    assert rows[2].id == "sums/data-00001-of-00002.arrow:1"
    assert prompts_of(folder, "train") == ["a", "b", "c"]
    with pytest.raises(UserError, match=r'data\.split = "test", but .*sums is one split by itself \(train\)'):
        read(folder, split="test")


def test_a_saved_dict_of_splits(tmp_path: Path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [[split]], split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert prompts_of(tmp_path) == ["train"]
    assert prompts_of(tmp_path, "test") == ["test"]
    with pytest.raises(UserError, match=r'has no split "tset"; did you mean "test"\? Its splits are: train, test'):
        read(tmp_path, split="tset")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(UserError, match=r"has the splits a, b; name one with data\.split"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"names the split b, but .*state\.json is missing"):
        read(tmp_path, split="b")


def test_a_missing_or_damaged_shard_is_named(tmp_path: Path):
    folder = save_to_disk(tmp_path / "sums", [["a"], ["b"], ["c"]])
    shard = folder / "data-00001-of-00003.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"data-00001-of-00003\.arrow: .*cut short"):
        read(folder)
    shard.unlink()
    with pytest.raises(UserError, match=r"lacks data-00001-of-00003\.arrow, which state\.json names"):
        read(folder)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json is not readable as JSON"),
        ("[]", "state.json holds no JSON object"),
        ("{}", "_data_files must list names"),
        ('{"_data_files": [{"filename": "../secret.arrow"}]}', "_data_files must list names in this folder"),
        ('{"_data_files": [{"filename": 3}]}', "_data_files must list names"),
        ('{"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "y"}]}', "flatten_indices"),
    ],
)
def test_a_broken_state_file_is_named(tmp_path: Path, state: str, message: str):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_snapshots_of_the_hub(tmp_path: Path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        put(tmp_path / "gsm" / "data" / f"{name}.parquet", name)
    (tmp_path / "gsm" / "README.md").write_text("---\n---\n")
    (tmp_path / "gsm" / ".cache").mkdir()
    put(tmp_path / "gsm" / ".cache" / "train.parquet", "hidden")
    (tmp_path / "gsm" / "dataset_infos.json").write_text("{}")
    assert prompts_of(tmp_path / "gsm") == ["train-00000-of-00002", "train-00001-of-00002"]
    assert prompts_of(tmp_path / "gsm", "test") == ["test-00000-of-00001"]
    assert read(tmp_path / "gsm")[0].id == "gsm/data/train-00000-of-00002.parquet:1"
    (tmp_path / "gsm" / "data" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="lacks train-00000-of-00002; fetch the whole dataset again"):
        read(tmp_path / "gsm")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["rows.jsonl"], {"train": ["rows.jsonl"]}),
        (["train.csv", "dev.csv"], {"train": ["train.csv"], "validation": ["dev.csv"]}),
        (["gsm_train.jsonl", "gsm-test.jsonl"], {"train": ["gsm_train.jsonl"], "test": ["gsm-test.jsonl"]}),
        (["training/a.jsonl", "test/a.jsonl"], {"train": ["training/a.jsonl"], "test": ["test/a.jsonl"]}),
        (["latest.jsonl"], {"train": ["latest.jsonl"]}),
        (
            ["data/sft-00000-of-00001.parquet", "data/train-00000-of-00001-ab12.parquet"],
            {"sft": ["data/sft-00000-of-00001.parquet"], "train": ["data/train-00000-of-00001-ab12.parquet"]},
        ),
    ],
)  # fmt: skip
def test_splits_are_told_by_names(tmp_path: Path, names: list[str], splits: dict[str, list[str]]):
    for name in names:
        put(tmp_path / name, name)
    assert {split: prompts_of(tmp_path, split) for split in splits} == splits


def test_files_in_several_places_are_a_question(tmp_path: Path):
    for config in ("main", "socratic"):
        put(tmp_path / config / "train-00000-of-00001.parquet", config)
    with pytest.raises(UserError, match="several folders: main, socratic; name the one"):
        read(tmp_path)
    assert prompts_of(tmp_path / "main") == ["main"]
    put(tmp_path / "both" / "train.csv", "a")
    put(tmp_path / "both" / "train.jsonl", "a")
    with pytest.raises(UserError, match=r"several formats: \.csv, \.jsonl"):
        read(tmp_path / "both")


def test_a_loading_script_is_never_run(tmp_path: Path):
    put(tmp_path / "train.jsonl", "a")
    (tmp_path / "sums.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"holds sums\.py: loading scripts are never run; name the data files"):
        read(tmp_path)
    assert [row.prompt for row in read(tmp_path / "*.jsonl")] == ["a"]


def test_a_folder_without_data_is_named(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"is a folder without data: it has neither state\.json nor files that end in"):
        read(tmp_path)


def test_linked_folders_are_not_followed_and_linked_files_are(tmp_path: Path):
    """The hub's cache keeps its files as links."""
    put(tmp_path / "blobs" / "0a1b2c", "a").rename(tmp_path / "blobs" / "0a1b2c")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "train.jsonl").symlink_to("../blobs/0a1b2c")
    (snapshot / "loop").symlink_to(".", target_is_directory=True)
    assert prompts_of(snapshot) == ["a"]
    (snapshot / "test.jsonl").symlink_to("../blobs/absent")
    with pytest.raises(UserError, match=r"test\.jsonl is a link to \.\./blobs/absent, which does not exist"):
        read(snapshot, split="test")
    assert os.listdir(snapshot / "loop") == os.listdir(snapshot)
