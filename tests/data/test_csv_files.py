"""CSV files as spreadsheets and scripts write them."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.reading import read

from ratoon.data.csv_files import read_csv
from ratoon.types import UserError


def write(folder: Path, content: bytes) -> Path:
    path = folder / "rows.csv"
    path.write_bytes(content)
    return path


def test_quotes_commas_line_breaks_and_marks(tmp_path: Path):
    content = b'\xef\xbb\xbfprompt,answer\r\n"a, ""b""\r\nc",1\r\n\r\nd,\r\n" e ",f'
    assert list(read_csv(write(tmp_path, content))) == [
        (2, {"prompt": 'a, "b"\r\nc', "answer": "1"}),
        (5, {"prompt": "d", "answer": ""}),
        (6, {"prompt": " e ", "answer": "f"}),
    ]


CELLS = st.text(st.characters(codec="utf-8"), max_size=6)


@given(
    width=st.integers(1, 4),
    data=st.data(),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_writer_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, width: int, data: st.DataObject, quoting: Any, end: str
):
    header = [f"column {index}" for index in range(width)]
    rows = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=5))
    text = io.StringIO()
    csv.writer(text, quoting=quoting, lineterminator=end).writerows([header, *rows])
    path = write(tmp_path_factory.mktemp("csv"), text.getvalue().encode())
    found = list(read_csv(path))
    assert [list(values.values()) for _, values in found] == rows
    lines = path.read_bytes().split(b"\n")
    assert all(lines[line - 1].startswith(b'"') for line, _ in found), "the line on which the record begins"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", ["has no rows", "header line"]),
        (b"\n\n", ["has no rows"]),
        (b"prompt,answer\na,b\nc\n", ["line 3: 1 fields", "header names 2 (prompt, answer)", "quote fields"]),
        (b"prompt,answer\na,b,c\n", ["line 2: 3 fields"]),
        (b'prompt,answer\n"a\nb",c\nd,e,f\n', ["line 4: 3 fields"]),
        (b'prompt,answer\na,b\n"c,d\ne,f\n', ["line 3", "broken CSV", "unexpected end of data"]),
        (b'prompt,answer\n"a"b,c\n', ["line 2", "broken CSV", "double the quotes"]),
        (b"prompt,answer\rcaf,b\r", ["line 1", "broken CSV"]),
        (b"prompt,,answer\na,b,c\n", ["line 1", "no name for column 2"]),
        (b"prompt,prompt\na,b\n", ["line 1", "'prompt' twice"]),
        (b"prompt;answer\na;b\n", ["line 1", "semicolons"]),
        (b"prompt\tanswer\na\tb\n", ["line 1", "tabs"]),
        ("prompt,answer\na,é\n".encode("latin-1"), ["line 2", "not UTF-8", "0xe9 at position 2"]),
        ("prompt,answer\n".encode("utf-16"), ["line 1", "not UTF-8 but UTF-16"]),
    ],
)
def test_a_bad_file_is_named_by_line(tmp_path: Path, content: bytes, wanted: list[str]):
    with pytest.raises(UserError) as caught:
        list(read_csv(write(tmp_path, content)))
    for part in ("rows.csv", *wanted):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_prompt_is_one_field(tmp_path: Path):
    """The csv module's own limit is 131,072 characters."""
    ((_, values),) = read_csv(write(tmp_path, b"prompt\n" + b"x" * 300_000))
    assert len(values["prompt"]) == 300_000


def test_a_file_without_header_names_what_it_took_for_one(tmp_path: Path):
    path = write(tmp_path, b"what is 1+1?,2\nwhat is 1+2?,3\n")
    with pytest.raises(UserError, match=r'line 2: no column "prompt"; its columns are 2, what is 1\+1\?: set data'):
        read(path)
