"""What a function prints can be read."""

from pathlib import Path

import psutil
import pytest
from tests.rewards.pools import RUNS_THE_RESPONSE, open_pool, scored

from ratoon.rewards.output_log import MAX_BYTES, OutputLog


def test_prints_and_unfinished_lines_are_kept_from_the_import_on(tmp_path: Path):
    log = tmp_path / "rewards.log"
    source = (
        "import sys\nprint('loaded')\ndef score(response, answer):\n"
        "    print('saw', repr(response), answer)\n    print('é.', end='', file=sys.stderr)\n    return 1\n"
    )
    with open_pool(tmp_path, source) as pool:
        pool.check([], set())  # what was printed before anybody said where to
        pool.show_output(log)
        scored(pool, "a", "b")
    assert log.read_text() == "loaded\nsaw 'a' 4\né.saw 'b' 4\né."
    with open_pool(tmp_path, source) as pool:
        pool.show_output(log)
        scored(pool, "c")
    assert log.read_text().endswith("é.loaded\nsaw 'c' 4\né."), "a resumed run appends"


def test_without_a_print_there_is_no_file(tmp_path: Path):
    with open_pool(tmp_path, "def score(response): return 1") as pool:
        pool.show_output(tmp_path / "rewards.log")
        scored(pool, "a")
    assert not (tmp_path / "rewards.log").exists()


def test_endless_printing_costs_little_disk_and_no_memory(tmp_path: Path):
    log = tmp_path / "rewards.log"
    code = "import os\nfor _ in range(60): os.write(1, b'x' * 999_999 + b'\\n')\nvalue = 1"
    with open_pool(tmp_path, RUNS_THE_RESPONSE, timeout_s=120) as pool:
        pool.show_output(log)
        before = psutil.Process().memory_info().rss
        assert scored(pool, code, code) == [1.0, 1.0]
        assert psutil.Process().memory_info().rss - before < 30e6
    text = log.read_bytes()
    assert len(text) < MAX_BYTES + 200
    assert text.count(b"is dropped)") == 1 and text.endswith(b"is dropped)\n")
    with open_pool(tmp_path, RUNS_THE_RESPONSE) as pool:
        pool.show_output(log)
        scored(pool, "print('more')\nvalue = 1")
    assert log.read_bytes() == text, "the limit is the file's, not the process's"


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path):
    log = OutputLog()
    log.open(tmp_path / "absent" / "rewards.log")
    log.add(b"x")


def test_standard_error_of_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with open_pool(tmp_path, "def score(response):\n    print('saw', response)\n    return 1\n") as pool:
        pool.show_output(None)
        scored(pool, "a")
    assert capfd.readouterr() == ("", "saw a\n")
