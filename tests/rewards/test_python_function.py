"""Functions as users write them."""

import asyncio
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from ratoon.rewards import RewardConfig, build_reward_fn, score
from ratoon.types import Prompt, Response, RewardFn, RolloutGroup, UserError


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def build(folder: Path, source: str, *, columns: set[str] | None = None, **settings: Any) -> RewardFn:
    (folder / "mine.py").write_text(source)
    config = RewardConfig.model_validate({"function": "python:mine.py:score", **settings})
    return build_reward_fn(config, base_dir=folder, columns=columns)


def rewards(reward_fn: RewardFn, *texts: str, answer: str | None = "4", **metadata: Any) -> list[float]:
    prompt = Prompt("rows.jsonl:7", np.array([1]), "2+2=", answer, metadata)
    group = RolloutGroup(prompt, tuple(Response(np.array([1]), text=text) for text in texts))
    scored = score(group, reward_fn).rewards_N
    assert scored is not None
    return scored.tolist()


def test_a_reward_is_two_lines(tmp_path: Path):
    reward_fn = build(tmp_path, "def score(response, answer):\n    return response.strip() == answer\n")
    assert rewards(reward_fn, " 4", "5") == [1.0, 0.0]


def test_parameters_are_filled_by_name(tmp_path: Path):
    source = (
        "def score(level, prompt, *, metadata, response, weight=10.0):\n"
        "    return level + len(prompt) + metadata['level'] + len(response) + weight\n"
    )
    reward_fn = build(tmp_path, source, columns={"level"})
    assert rewards(reward_fn, "abc", level=100) == [100 + 4 + 100 + 3 + 10.0]
    assert rewards(reward_fn, "abc", level=100, weight=0.5) == [207.5], "a column fills an optional parameter"


def test_a_function_may_take_everything(tmp_path: Path):
    source = "def score(response, **rest):\n    return len(rest)\n"
    assert rewards(build(tmp_path, source), "a", level=1, prompt="a column cannot hide the prompt") == [4.0]


def test_what_a_function_changes_stays_its_own(tmp_path: Path):
    source = "def score(metadata, tags):\n    metadata['tags'].append(1)\n    metadata.clear()\n    return len(tags)\n"
    tags = ["a"]
    assert rewards(build(tmp_path, source), "a", "b", "c", tags=tags) == [2.0, 2.0, 2.0]
    assert tags == ["a"]


def test_metadata_may_be_any_mapping(tmp_path: Path):
    reward_fn = build(tmp_path, "def score(metadata):\n    return metadata['level']\n")
    prompt = Prompt("p", np.array([1]), metadata=MappingProxyType({"level": 2}))
    assert reward_fn(prompt, [Response(np.array([1]))]) == [2.0]


def test_no_answer_is_none(tmp_path: Path):
    assert rewards(build(tmp_path, "def score(answer, *ignored):\n    return answer is None\n"), "a", answer=None) == [
        1
    ]


def test_coroutine_functions_and_callable_objects_work(tmp_path: Path):
    source = "import asyncio\nasync def score(response):\n    await asyncio.sleep(0)\n    return len(response)\n"
    assert rewards(build(tmp_path, source), "abc", "a") == [3.0, 1.0]
    source = (
        "class Judge:\n    def __call__(self, response):\n        return len(response)\nscore = Judge()\nextra = 1\n"
    )
    assert rewards(build(tmp_path, source), "abcd") == [4.0]


def test_a_coroutine_function_works_inside_a_running_loop(tmp_path: Path):
    reward_fn = build(tmp_path, "async def score(response):\n    return len(response) + 10\n")

    async def train() -> list[float]:
        return rewards(reward_fn, "abc")

    assert asyncio.run(train()) == [13.0]


def test_a_file_may_import_its_neighbour_and_use_dataclasses(tmp_path: Path):
    (tmp_path / "ratoon_neighbour.py").write_text("VALUE = 3\n")
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom ratoon_neighbour import VALUE\n"
        "@dataclass\nclass A:\n    x: int = VALUE\ndef score(response):\n    return A().x\n"
    )
    assert rewards(build(tmp_path, source), "a") == [3.0]


def test_a_neighbour_does_not_shadow_the_standard_library(tmp_path: Path):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    sys.modules.pop("colorsys", None)
    source = "import colorsys\ndef score(response):\n    return colorsys.ONE_THIRD > 0\n"
    assert rewards(build(tmp_path, source), "a") == [1.0]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    functions: list[RewardFn] = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        functions.append(build(folder, f"VALUE = {value}\ndef score(response):\n    return VALUE\n"))
    assert [rewards(function, "a") for function in functions] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("def score(response)\n    return 1\n", ["mine.py:1", "SyntaxError"]),
        ("def score(response):\nreturn 1\n", ["mine.py:2", "IndentationError"]),
        ("\n\nimport no_such_module\n", ["mine.py:3", "ModuleNotFoundError", "no_such_module"]),
        ("def f():\n    return 1 / 0\nf()\n", ["mine.py:2", "ZeroDivisionError"]),
        ("import asyncio\nraise asyncio.CancelledError\n", ["mine.py:2", "CancelledError"]),
        ("import sys\nsys.exit(3)\n", ["mine.py:2", "SystemExit"]),
        ("\x00", ["mine.py", "Error"]),
        ("def scores(response): return 1\n", ["does not exist", "scores"]),
        ("", ["does not exist", "none"]),
        ("score = 3\n", ["is not a function"]),
        ("def score(): return 1\n", ["takes no parameter"]),
        ("def score(response, /): return 1\n", ['"response" is positional only']),
        ("def score(completion): return 1\n", ['asks for "completion"', "the data does not have", "prompt, response"]),
        ("def score(response, lvl): return 1\n", ['asks for "lvl"', 'did you mean "level"']),
    ],
)
def test_what_cannot_work_is_refused_when_built(tmp_path: Path, source: str, wanted: list[str]):
    with pytest.raises(UserError) as caught:
        build(tmp_path, source, columns={"level"})
    for part in wanted:
        assert part in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    config = RewardConfig(function="python:sub/mine.py:score")
    with pytest.raises(UserError, match=r"sub/mine\.py does not exist; paths are relative to the recipe"):
        build_reward_fn(config, base_dir=tmp_path)


@pytest.mark.parametrize("file", ["~no-such-user/m.py", "x" * 5000 + ".py", "a\x00b.py"])
def test_an_impossible_path_names_the_key(tmp_path: Path, file: str):
    with pytest.raises(UserError, match=r"^reward\.function: .* cannot be looked up"):
        build_reward_fn(RewardConfig(function=f"python:{file}:score"), base_dir=tmp_path)


def test_unknown_columns_are_found_at_the_first_prompt_at_the_latest(tmp_path: Path):
    reward_fn = build(tmp_path, "def score(response, level): return level\n")
    with pytest.raises(UserError, match=r"asks for \"level\", which prompt 'rows\.jsonl:7' does not have"):
        rewards(reward_fn, "a")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return 1 / 0", ["failed: ZeroDivisionError: division by zero", "mine.py:3"]),
        ("raise KeyError('x')", ["failed: KeyError: 'x'"]),
        ("raise TimeoutError", ["failed: TimeoutError"]),
        ("exit(3)", ["failed: SystemExit: 3"]),
        ("assert False", ["failed: AssertionError"]),
        ("import asyncio; raise asyncio.CancelledError", ["failed: CancelledError"]),
        ("raise GeneratorExit('x')", ["failed: GeneratorExit: x"]),
        ("class E(Exception): __str__ = lambda self: 1 / 0\n        raise E", ["failed: E, whose message cannot be"]),
        ("raise ValueError('x' * 10**6)", ["failed: ValueError: xxx", "... and 999,700 more characters"]),
        ("return None", ["is None, not a number"]),
        ("return float('nan')", ["is nan"]),
        ("return '1'", ["is str '1'"]),
        ("return [1.0]", ["is list"]),
        ("return (lambda f: f(f))(lambda f: f(f))", ["failed: RecursionError"]),
        ("return (1.0 for _ in 'a')", ["is generator"]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_failing_call_names_prompt_response_and_cause(tmp_path: Path, prefix: str, body: str, wanted: list[str]):
    source = f"{prefix}def score(response):\n    if response == 'b':\n        {body}\n    return 1\n"
    reward_fn = build(tmp_path, source)
    with pytest.raises(UserError) as caught:
        rewards(reward_fn, "a", "b")
    for part in ("reward \"python:mine.py:score\" of prompt 'rows.jsonl:7', response 1,", *wanted):
        assert part in str(caught.value)


@pytest.mark.parametrize("wait", ["pass", "time.sleep(0.1)"])
@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_call_that_does_not_return_ends_by_the_limit(tmp_path: Path, prefix: str, wait: str):
    """verl#6673, verl#288: a busy loop froze the run without a word. Killing it takes a process, naming it does not."""
    stop = tmp_path / "stop"
    source = (
        f"import os, time\n{prefix}def score(response):\n    while not os.path.exists({str(stop)!r}):\n        {wait}\n"
    )
    reward_fn = build(tmp_path, source, timeout_s=0.2)
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"did not return within reward\.timeout_s = 0\.2 s.*this response: 'abc'"):
        rewards(reward_fn, "abc")
    assert time.perf_counter() - start < 10
    stop.touch()
