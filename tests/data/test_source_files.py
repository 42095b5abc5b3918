"""What a source may name, and what it may not."""

import os
from pathlib import Path

import pytest
from tests.data.reading import read

from ratoon.data.config import DataConfig
from ratoon.data.source_files import read_files
from ratoon.types import UserError

ROW = '{"prompt": "a", "answer": "b"}\n'


def test_a_pattern_names_several_files_in_order(tmp_path: Path):
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl", ".hidden.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("prompt,answer\na,b\n" if name.endswith("csv") else ROW * 2)
    (tmp_path / "loop").symlink_to(".", target_is_directory=True)
    assert [row.id for row in read(tmp_path / "[ab].*")] == ["a.csv:2", "b.jsonl:1", "b.jsonl:2"]
    ids = [row.id for row in read(tmp_path / "**" / "*.jsonl")]
    assert ids == ["b.jsonl:1", "b.jsonl:2", "sub/c.jsonl:1", "sub/c.jsonl:2"], "a loop of links is not followed"
    (source,) = DataConfig(source="sub/*.jsonl").each_source()
    assert [row.id for row in read_files(source, base_dir=tmp_path)] == ["c.jsonl:1", "c.jsonl:2"]
    with pytest.raises(UserError, match=r"no file matches; .* has a\.csv, b\.jsonl"):
        read(tmp_path / "*.parquet")
    with pytest.raises(UserError, match=r"data\.split cannot act on"):
        read(tmp_path / "*.jsonl*", split="test")


def test_a_name_with_brackets_is_a_file_where_there_is_one(tmp_path: Path):
    (tmp_path / "rows[1].jsonl").write_text(ROW)
    assert [row.id for row in read(tmp_path / "rows[1].jsonl")] == ["rows[1].jsonl:1"]


def test_the_first_rows_are_read_and_no_more(tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(ROW * 3)
    assert [row.id for row in read(tmp_path / "*.jsonl", max_rows=4)] == [
        "a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.jsonl:1",
    ]  # fmt: skip
    (tmp_path / "b.jsonl").write_text("broken")
    assert len(read(tmp_path / "*.jsonl", max_rows=3)) == 3


def test_what_is_no_data_file_is_refused(tmp_path: Path):
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(
        UserError, match=r"rows\.txt must end in \.jsonl, .*\.arrow, be a dataset folder or a generator"
    ):
        read(tmp_path / "rows.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe\.jsonl is not a regular file"):
        read(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(UserError, match=r"data\.source: .*loop\.jsonl.* cannot be looked up"):
        read(tmp_path / "loop.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("absent")
    for source in ("dangling.jsonl", "dang*.jsonl"):
        with pytest.raises(UserError, match=r"dangling\.jsonl is a link to absent, which does not exist"):
            read(tmp_path / source)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (tmp_path / name).write_text(ROW)

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(UserError, match=rf"{name} cannot be read: Permission denied"):
        read(tmp_path / name)
