"""What the warm start imitates, and who is named when there is nothing to imitate."""

from pathlib import Path

import numpy as np
import pytest

from ratoon.loop.demonstrations import demonstrations_of
from ratoon.types import Prompt
from ratoon.types.errors import UserError

PROMPTS = (
    Prompt("p:0", np.array([1]), text="one", answer="eno", metadata={"hint": "o", "level": 1}),
    Prompt("p:1", np.array([2]), text="two", answer="owt", metadata={"hint": "t", "level": 2}),
    Prompt("p:2", np.array([3]), text="ten", answer=None, metadata={"hint": "n", "level": 3}),
)


def from_code(tmp_path: Path, code: str) -> tuple[str, ...]:
    (tmp_path / "teacher.py").write_text(code)
    return demonstrations_of("python:teacher.py:show", PROMPTS, base_dir=tmp_path)


def test_answers_are_the_default_and_may_be_missing(tmp_path: Path):
    assert demonstrations_of(None, PROMPTS, base_dir=tmp_path) == ("eno", "owt", "")


def test_column(tmp_path: Path):
    assert demonstrations_of("column:hint", PROMPTS, base_dir=tmp_path) == ("o", "t", "n")


@pytest.mark.parametrize("column", ["absent", "level"])
def test_column_without_text_names_key_and_prompt(tmp_path: Path, column: str):
    with pytest.raises(UserError, match=rf"sft\.demonstrations = 'column:{column}'.*'p:0'"):
        demonstrations_of(f"column:{column}", PROMPTS, base_dir=tmp_path)


def test_function_is_given_what_it_names(tmp_path: Path):
    code = (
        "def show(prompt, level, answer=None, metadata=None):\n    return f'{prompt}{level}{answer}{metadata['hint']}'"
    )
    assert from_code(tmp_path, code.replace("'hint'", '"hint"')) == ("one1enoo", "two2owtt", "ten3Nonen")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def show(prompt): return None", ["None", "'p:0'"]),
        ("def show(prompt): return 'x' if prompt == 'one' else ''", ["''", "'p:1'"]),
        ("def show(level): return [][level]", ["show() in", "teacher.py", "'p:0'", "IndexError"]),
        ("def show(prompt): exit(3)", ["show() in", "'p:0'", "SystemExit: 3"]),
        ("import asyncio\ndef show(prompt): raise asyncio.CancelledError", ["'p:0'", "CancelledError"]),
        ("def show(prompt): raise ValueError('x' * 10**6)", ["'p:0'", "more characters"]),
        ("def show(prompt): return ['x' * 10**6]", ["'p:0'", "more characters"]),
        ("def show(colour): return 'x'", ["colour", "'p:0'"]),
        ("def tell(prompt): return 'x'", ["show()", "does not exist", "tell"]),
        ("def show(prompt) return", ["sft.demonstrations", "teacher.py:1", "SyntaxError"]),
    ],
)
def test_faulty_function_is_named_with_the_prompt(tmp_path: Path, code: str, words: list[str]):
    with pytest.raises(UserError) as raised:
        from_code(tmp_path, code)
    for word in words:
        assert word in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_what_a_function_changes_stays_its_own(tmp_path: Path):
    prompts = [Prompt("p:0", np.array([1]), metadata={"hints": ["a", "b"]})] * 2
    (tmp_path / "teacher.py").write_text("def show(metadata, hints): return hints.pop() + metadata['hints'].pop()")
    assert demonstrations_of("python:teacher.py:show", prompts, base_dir=tmp_path) == ("ba", "ba")
