"""Parquet and Arrow files, whole and damaged."""

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.reading import read

from ratoon.types import UserError

TABLE = pa.table(
    {
        "prompt": ["1+1=", "2+2="],
        "answer": [2, 4],
        "reward_model": [{"ground_truth": "two", "style": "rule"}, {"ground_truth": "four", "style": "rule"}],
        "tags": [["a", "b"], []],
        "level": pa.array(["easy", "hard"]).dictionary_encode(),
        "when": [datetime.date(2025, 1, 1), None],
    }
)


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, **options)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, **options)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_nested_columns_become_plain_values(tmp_path: Path, name: str):
    first, second = read(write(tmp_path / name, TABLE))
    assert (first.id, first.prompt, first.answer) == (f"{name}:1", "1+1=", "2")
    assert first.metadata == {
        "prompt": "1+1=",
        "answer": 2,
        "reward_model": {"ground_truth": "two", "style": "rule"},
        "tags": ["a", "b"],
        "level": "easy",
        "when": datetime.date(2025, 1, 1),
    }
    assert second.metadata["tags"] == []
    assert second.metadata["when"] is None


def test_an_answer_inside_a_struct(tmp_path: Path):
    """verl keeps its answers so."""
    path = write(tmp_path / "rows.parquet", TABLE)
    rows = read(path, answer_column="reward_model.ground_truth")
    assert [row.answer for row in rows] == ["two", "four"]
    assert rows[0].metadata["reward_model"] == {"ground_truth": "two", "style": "rule"}
    with pytest.raises(UserError, match=r'row 1: no column "reward_model\.truth"'):
        read(path, answer_column="reward_model.truth")


def test_both_arrow_formats_are_read(tmp_path: Path):
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(path), TABLE.schema) as file:
        file.write_table(TABLE)
    assert [row.id for row in read(path)] == ["rows.arrow:1", "rows.arrow:2"]


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8), min_size=1),
    group=st.integers(1, 4),
    name=st.sampled_from(["rows.parquet", "rows.arrow"]),
)
def test_rows_are_numbered_across_batches(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], group: int, name: str
):
    table = pa.table({"prompt": prompts, "answer": prompts})
    options = {"row_group_size": group} if name.endswith("parquet") else {"max_chunksize": group}
    rows = read(write(tmp_path_factory.mktemp("arrow") / name, table, **options))
    assert [row.prompt for row in rows] == prompts
    assert [row.id for row in rows] == [f"{name}:{number}" for number in range(1, len(prompts) + 1)]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"prompt": ["a", None], "answer": ["b", "b"]}, ["row 2", "got null"]),
        ({"prompt": ["a", " "], "answer": ["b", "b"]}, [":2: the prompt is empty"]),
        ({"prompt": [1, 2], "answer": ["b", "b"]}, ["row 1", "got a number"]),
        ({"prompt": [b"a", b"b"], "answer": ["b", "b"]}, ["row 1", "got a bytes"]),
        ({"prompt": ["a", "b"], "answer": [1.5, float("nan")]}, ["row 2", '"answer" is nan']),
        ({"prompt": ["a", "b"], "answer": [["x"], ["y"]]}, ["row 1", "got an array", 'answer_column = ""']),
        ({"question": ["a"], "answer": ["b"]}, ["row 1", 'no column "prompt"', "answer, question"]),
        ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, ["has no rows"]),
        ({"prompt": ["a"], "answer": ["b"], "image": [{"bytes": b"x", "path": None}]}, ["row 1", "holds media"]),
        ({"prompt": ["a"], "answer": ["b"], "images": [[{"bytes": b"x", "path": ""}]]}, ['"images" holds media']),
        ({"prompt": ["a"], "answer": ["b"], "ratoon_source": ["c"]}, ["row 1", "reserved"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_bad_row_is_named(tmp_path: Path, name: str, columns: dict[str, Any], wanted: list[str]):
    path = write(tmp_path / name, pa.table(columns))
    with pytest.raises(UserError) as caught:
        read(path)
    for part in (name, *wanted):
        assert part in str(caught.value)


def test_numbers_as_answers_become_their_text(tmp_path: Path):
    answers = pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00")])
    path = write(tmp_path / "rows.parquet", pa.table({"prompt": ["a", "b"], "answer": answers}))
    assert [row.answer for row in read(path)] == ["1.50", "2.00"]


def test_values_that_python_cannot_hold_are_named(tmp_path: Path):
    broken = pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"a", b"\xff"], pa.binary()).buffers()[1:]])
    path = write(tmp_path / "rows.arrow", pa.table({"prompt": ["a", "b"], "answer": broken}))
    with pytest.raises(UserError, match=r'row 2: column "answer" \(string\).*UnicodeDecodeError'):
        read(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_time_zone_that_nobody_knows_is_named(tmp_path: Path, name: str):
    when = pa.array([0, 1], pa.timestamp("us", tz="Atlantis/Poseidonis"))
    path = write(tmp_path / name, pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "when": when}))
    with pytest.raises(UserError, match=r'row 1: column "when" .*Poseidonis.*convert or remove that column'):
        read(path)


def test_a_column_twice_is_refused(tmp_path: Path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    for name in ("rows.parquet", "rows.arrow"):
        with pytest.raises(UserError, match="'prompt' stands twice"):
            read(write(tmp_path / name, table))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("damage", ["empty", "half", "end", "text", "noise"])
def test_damaged_files_are_named(tmp_path: Path, name: str, damage: str):
    table = pa.table({"prompt": [f"prompt {n}" for n in range(5_000)], "answer": ["x"] * 5_000})
    path = write(tmp_path / name, table)
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "end": whole[:-8],
        "text": b'{"prompt": "a", "answer": "b"}\n',
        "noise": b"\x00" * 100,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=name) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_page_is_named(tmp_path: Path):
    table = pa.table({"prompt": [f"prompt {n}" for n in range(5_000)], "answer": ["x"] * 5_000})
    path = write(tmp_path / "rows.parquet", table, use_dictionary=False, compression="snappy")
    content = bytearray(path.read_bytes())
    content[1_000:3_000] = b"\xff" * 2_000
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.parquet: cannot be read as Parquet: .*damaged"):
        read(path)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=80), head=st.sampled_from([b"", b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"]))
def test_any_bytes_are_rows_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, head: bytes):
    folder = tmp_path_factory.mktemp("any")
    for name in ("any.parquet", "any.arrow"):
        (folder / name).write_bytes(head + content)
        with pytest.raises(UserError, match=name):
            read(folder / name)
