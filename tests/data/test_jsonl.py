"""Files as people have them."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.reading import read

from ratoon.types import UserError


def test_rows_carry_line_numbers_answers_and_all_columns(tmp_path: Path):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+1=", "answer": 2, "level": 1}\r\n'
        b"\n"
        b'  {"prompt": "caf\xc3\xa9\xe2\x80\xa8?", "answer": "oui", "tags": ["a"]}'
    )
    first, second = read(path)
    assert (first.id, first.prompt, first.answer) == ("sums.jsonl:1", "1+1=", "2")
    assert first.metadata == {"prompt": "1+1=", "answer": 2, "level": 1}
    assert (second.id, second.prompt, second.answer) == ("sums.jsonl:3", "café\u2028?", "oui")
    assert second.metadata == {"prompt": "café\u2028?", "answer": "oui", "tags": ["a"]}


GOOD = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"prompt": "a", "answer": }', ["line 2", "column 27", "broken JSON"]),
        (b'{"prompt": "a", "ans', ["line 2", "broken JSON"]),
        (b'{"prompt": "a", "answer": "b"} {"prompt": "c"}', ["line 2", "Extra data", "one whole JSON object"]),
        (b'["a", "b"]', ["line 2", "an array", "object is needed"]),
        (b"null", ["line 2", "null where"]),
        (b'"text"', ["line 2", "text where"]),
        ("é".encode("latin-1"), ["line 2", "not UTF-8", "0xe9", "save the file as UTF-8"]),
        (b'{"prompt": "caf\xe9", "answer": "b"}', ["line 2", "not UTF-8", "position 15"]),
        (b"\x00\x01", ["line 2", "broken JSON"]),
        (
            b'{"question": "a", "answer": "b"}',
            ["line 2", 'no column "prompt"', "answer, question", "data.prompt_column"],
        ),
        (b"{}", ["line 2", "its columns are none"]),
        (b'{"prompt": "a", "reply": "b"}', ["line 2", 'no column "answer"', "prompt, reply", 'or to ""']),
        (b'{"prompt": "", "answer": "b"}', ["rows.jsonl:2", "prompt is empty"]),
        (b'{"prompt": " \\t\\n", "answer": "b"}', ["rows.jsonl:2", "prompt is empty"]),
        (b'{"prompt": 3, "answer": "b"}', ["line 2", '"prompt" must be text', "got a number"]),
        (b'{"prompt": null, "answer": "b"}', ["line 2", '"prompt" must be text', "got null", "data.bad_rows"]),
        (b'{"prompt": {"role": "user"}, "answer": "b"}', ["line 2", "got an object"]),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}', ["line 2", "message 1", "needs role and content"]),
        (b'{"prompt": "a", "answer": null}', ["line 2", '"answer" must be text', "got null", 'answer_column = ""']),
        (b'{"prompt": "a", "answer": true}', ["line 2", "got a boolean"]),
        (b'{"prompt": "a", "answer": {"x": 1}}', ["line 2", "got an object"]),
        (b'{"prompt": "a", "answer": NaN}', ["line 2", "NaN is not a JSON number"]),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", ["line 2", "not readable as JSON"]),
        (b'{"prompt": "a", "answer": ' + b"[" * 200_000, ["line 2", "JSON"]),
        (b'{"prompt": "a", "answer": "b", "prompt": "c"}', ["line 2", "'prompt' stands twice"]),
        (b'{"prompt": "a", "answer": "b", "n": [{"x": 1, "x": 1}]}', ["line 2", "'x' stands twice"]),
        (b'{"prompt": "a\\ud83d", "answer": "b"}', ["rows.jsonl:2", "surrogate", "prompt"]),
        (b'{"prompt": "a", "answer": "\\ud83d"}', ["rows.jsonl:2", "surrogate", "answer"]),
        (b'{"prompt": "a", "answer": "b", "note": "\\udc00"}', ["line 2", "surrogate", "'note'"]),
        (
            b'{"prompt": "a", "answer": "b", "n": ' + b'[{"x": ' * 60 + b"1" + b"}]" * 60 + b"}",
            ["line 2", "'n'", "more than 100 deep", "remove that column"],
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: bytes, wanted: list[str]):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(UserError) as caught:
        read(path)
    for part in ("rows.jsonl", *wanted):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value), "one paragraph"


def test_utf16_is_named_as_a_wrong_encoding(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-16")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="has no rows"):
        read(path)


def test_a_missing_file_names_its_neighbours(tmp_path: Path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    with pytest.raises(UserError, match=r"trian\.jsonl does not exist; .* has train\.jsonl"):
        read(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match="nor does the folder"):
        read(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no data file"):
        read(tmp_path / "empty" / "train.jsonl")


def test_a_folder_is_not_a_file(tmp_path: Path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        read(tmp_path / "d.jsonl")


def test_data_without_answers(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n')
    assert [row.answer for row in read(path, answer_column="")] == [None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(lines=st.lists(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()), max_size=4))
def test_any_bytes_are_rows_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]):
    path = tmp_path_factory.mktemp("any") / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        rows, message = read(path), ""
    except UserError as error:
        rows, message = [], str(error)
    assert "any.jsonl" in message or (rows and all(row.last_text.strip() for row in rows))


def test_an_array_in_one_file(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a",\n "answer": 1}, {"prompt": "b", "answer": 2}]')
    assert [(row.id, row.prompt, row.answer) for row in read(path)] == [
        ("rows.json:1", "a", "1"),
        ("rows.json:2", "b", "2"),
    ]
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    assert [row.id for row in read(path)] == ["rows.json:1", "rows.json:2"], "lines, as some call .json"
    for text, message in (
        ('[{"prompt": "a"},\n', "broken JSON at line 2, column 1"),
        ('[{"prompt": "a", "answer": 1}, 3]', "item 2: a number where an object is needed"),
        ('[{"prompt": "a", "answer": 1}, {"answer": 3}]', 'item 2: no column "prompt"'),
        ("[]", "has no rows"),
        ("", "has no rows"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"rows.json.*{message}"):
            read(path)


def test_compressed_lines_are_read_and_damage_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 3_000))
    assert len(read(path)) == 3_000
    whole = path.read_bytes()
    damaged = whole[:40] + b"\xff" * 8 + whole[48:]
    for content in (whole[:-20], damaged, GOOD, whole[:5]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"rows\.jsonl\.gz: damaged or cut short after line \d+"):
            read(path)
