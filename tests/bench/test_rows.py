"""What a row says of the code that made it."""

import subprocess
from pathlib import Path

import pytest

from ratoon.bench import rows


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_changed_checkout_is_called_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "src" / "ratoon" / "bench" / "rows.py"
    file.parent.mkdir(parents=True)
    file.write_text("one\n")
    (tmp_path / "README").write_text("one\n")
    monkeypatch.setattr(rows, "__file__", str(file))
    rows.commit.cache_clear()
    try:
        assert rows.commit() == "unknown"
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "one")
        head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
        (tmp_path / "README").write_text("two\n")
        rows.commit.cache_clear()
        assert rows.commit() == head, "only code counts"
        file.write_text("two\n")
        rows.commit.cache_clear()
        assert rows.commit() == f"{head}-dirty"
    finally:
        rows.commit.cache_clear()


def test_a_link_to_nothing_stays_and_its_rows_go_where_it_points(tmp_path: Path):
    link, target = tmp_path / "rows.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    rows.check_results(link)
    rows.append_rows(link, [])
    assert link.is_symlink() and target.exists()
