"""Paths that no file system can look up."""

from pathlib import Path

import pytest

from ratoon.data.user_paths import resolve_path
from ratoon.types.errors import UserError


def test_paths_are_relative_to_the_recipe_and_need_not_exist(tmp_path: Path):
    (tmp_path / "file").touch()
    for text in ("file", "absent", "absent/deeper", "file/deeper"):
        assert resolve_path(text, base_dir=tmp_path, key="data.source") == tmp_path / text
    assert resolve_path("/x/y", base_dir=tmp_path, key="data.source") == Path("/x/y")
    assert resolve_path("~/y", base_dir=tmp_path, key="data.source") == Path.home() / "y"


@pytest.mark.parametrize("text", ["~no-such-user/x.jsonl", "x" * 5000 + ".jsonl", "a\x00b.jsonl", "loop/x.jsonl"])
def test_impossible_paths_are_named_with_their_key(tmp_path: Path, text: str):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"^data\.source: '.* cannot be looked up \(.+\)") as caught:
        resolve_path(text, base_dir=tmp_path, key="data.source")
    assert len(str(caught.value)) < 500
