"""Functions as users write them."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.rewards.pools import open_pool, rewards_of, scored

from ratoon.rewards import RewardPool
from ratoon.types import Prompt, Response, RolloutGroup, UserError


def rewards(folder: Path, source: str, *texts: str, columns: set[str] | None = None, **values: Any) -> list[float]:
    """Of one group, by a function in a pool of its own."""
    with open_pool(folder, source) as pool:
        pool.check([], columns)
        return scored(pool, *texts, **values)


def test_a_reward_is_two_lines(tmp_path: Path):
    source = "def score(response, answer):\n    return response.strip() == answer\n"
    assert rewards(tmp_path, source, " 4", "5") == [1.0, 0.0]


def test_parameters_are_filled_by_name(tmp_path: Path):
    source = (
        "def score(level, prompt, *, metadata, response, weight=10.0):\n"
        "    return level + len(prompt) + metadata['level'] + len(response) + weight\n"
    )
    with open_pool(tmp_path, source) as pool:
        pool.check([], {"level"})
        assert scored(pool, "abc", level=100) == [100 + 4 + 100 + 3 + 10.0]
        assert scored(pool, "abc", level=100, weight=0.5) == [207.5], "a column fills an optional parameter"


def test_a_function_may_take_everything(tmp_path: Path):
    source = "def score(response, **rest):\n    return len(rest)\n"
    assert rewards(tmp_path, source, "a", level=1, prompt="a column cannot hide the prompt") == [4.0]


def test_what_a_function_changes_stays_its_own(tmp_path: Path):
    source = "def score(metadata, tags):\n    metadata['tags'].append(1)\n    metadata.clear()\n    return len(tags)\n"
    tags = ["a"]
    assert rewards(tmp_path, source, "a", "b", "c", tags=tags) == [2.0, 2.0, 2.0]
    assert tags == ["a"]


def test_metadata_may_be_any_mapping(tmp_path: Path):
    prompt = Prompt("p", np.array([1]), metadata=MappingProxyType({"level": 2}))
    with open_pool(tmp_path, "def score(metadata):\n    return metadata['level']\n") as pool:
        found = pool.score_now([RolloutGroup(prompt, (Response(np.array([1])),))])
    assert rewards_of(found.groups[0]) == [2.0]


def test_no_answer_is_none(tmp_path: Path):
    source = "def score(answer, *ignored):\n    return answer is None\n"
    assert rewards(tmp_path, source, "a", answer=None) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def score(response):\n    await asyncio.sleep(0)\n    return len(response)\n",
        "class Judge:\n    def __call__(self, response):\n        return len(response)\nscore = Judge()\nextra = 1\n",
        "class Judge:\n    async def __call__(self, response):\n        return len(response)\nscore = Judge()\n",
        "async def wait(response):\n    return len(response)\ndef score(response):\n    return wait(response)\n",
        "from functools import partial\ndef f(response, n):\n    return n * len(response)\nscore = partial(f, n=1)\n",
    ],
)
def test_functions_of_all_kinds_work(tmp_path: Path, source: str):
    assert rewards(tmp_path, source, "abc", "a") == [3.0, 1.0]


def test_coroutines_run_at_once_within_a_worker(tmp_path: Path):
    """What a judge behind a network needs. Each waits for all others of its worker."""
    source = (
        "import asyncio\nwaiting, gate = 0, asyncio.Event()\n"
        "async def score(response):\n"
        "    global waiting\n"
        "    waiting += 1\n"
        "    if waiting == 40: gate.set()\n"
        "    await gate.wait()\n"
        "    return int(response)\n"
    )
    texts = [str(number) for number in range(40)]
    assert rewards(tmp_path, source, *texts) == list(range(40))


def test_a_function_of_responses_is_called_once_for_a_prompt(tmp_path: Path):
    source = (
        "import time\n"
        "def score(responses, prompts, answers, metadata, level, extra=None):\n"
        "    lists = (prompts, answers, metadata, level)\n"
        "    assert all(isinstance(x, list) and len(x) == len(responses) for x in lists)\n"
        "    assert prompts[0] == '2+2=' and answers[-1] == '4' and metadata[0] == {'level': 2} and level[0] == 2\n"
        "    assert extra is None\n"
        "    return [len(response) / max(map(len, responses)) for response in responses]\n"
    )
    assert rewards(tmp_path, source, "abcd", "ab", "a", level=2, columns={"level"}) == [1, 0.5, 0.25]
    for returned in ("tuple(lengths)", "__import__('numpy').array(lengths)"):
        source = f"async def score(responses):\n    lengths = [len(r) for r in responses]\n    return {returned}\n"
        assert rewards(tmp_path, source, "abcd", "", "a") == [4, 0, 1]


def test_a_file_may_import_its_neighbour_and_use_dataclasses(tmp_path: Path):
    (tmp_path / "ratoon_neighbour.py").write_text("VALUE = 3\n")
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom ratoon_neighbour import VALUE\n"
        "@dataclass\nclass A:\n    x: int = VALUE\ndef score(response):\n    return A().x\n"
    )
    assert rewards(tmp_path, source, "a") == [3.0]
    assert "ratoon_neighbour" not in sys.modules, "a user's file runs in workers only"


def test_a_neighbour_does_not_shadow_the_standard_library(tmp_path: Path):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')\n")
    assert rewards(tmp_path, "import colorsys\ndef score(response):\n    return colorsys.ONE_THIRD > 0\n", "a") == [1]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    components: list[dict[str, str]] = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "mine.py").write_text(f"VALUE = {value}\ndef score(response):\n    return VALUE\n")
        components.append({"function": f"python:{value}/mine.py:score", "name": f"v{value}"})
    with open_pool(tmp_path, components=components) as pool:
        (group,) = pool.score_now([RolloutGroup(Prompt("p", np.array([1])), (Response(np.array([1])),))]).groups
    assert {name: values.tolist() for name, values in group.reward_components.items()} == {"v1": [1], "v2": [2]}


def test_a_function_may_use_our_extraction(tmp_path: Path):
    source = (
        "from ratoon.rewards import extract_answer\ndef score(response, answer):\n"
        "    return extract_answer(response, 'last-number') == answer\n"
    )
    assert rewards(tmp_path, source, "it is 4", "it is 5") == [1, 0]


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
        ("def score(responses, prompt): return 1\n", ['asks for "prompt"', 'did you mean "prompts"']),
        ("def score(response, responses): return 1\n", ['asks for "response" and for "responses"']),
        ("def score(response, lvl): return 1\n", ['asks for "lvl"', 'did you mean "level"']),
    ],
)
def test_what_cannot_work_is_refused_when_built(tmp_path: Path, source: str, wanted: list[str]):
    with open_pool(tmp_path, source) as pool, pytest.raises(UserError) as caught:
        pool.check([], {"level"})
    for part in wanted:
        assert part in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with (
        open_pool(tmp_path, components=[{"function": "format"}, {"function": "python:sub/mine.py:score"}]) as pool,
        pytest.raises(UserError, match=r"components\[1\]\.function: .*sub/mine\.py does not exist; paths are relative"),
    ):
        pool.check([])


@pytest.mark.parametrize("file", ["~no-such-user/m.py", "x" * 5000 + ".py", "a\x00b.py"])
def test_an_impossible_path_names_the_key(tmp_path: Path, file: str):
    with (
        open_pool(tmp_path, function=f"python:{file}:score") as pool,
        pytest.raises(UserError, match=r"^reward\.function: .* cannot be looked up"),
    ):
        pool.check([])


def test_unknown_columns_are_found_at_the_first_prompt_at_the_latest(tmp_path: Path):
    with (
        open_pool(tmp_path, "def score(response, level): return level\n", on_failure="zero") as pool,
        pytest.raises(UserError, match=r"asks for \"level\", which prompt 'rows\.jsonl:7' does not have"),
    ):
        scored(pool, "a")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory):
    """Pools of a function and of a coroutine function that do what the response says."""
    with ExitStack() as stack:
        pools: dict[str, RewardPool] = {}
        for prefix in ("", "async "):
            source = (
                "import time\n"
                f"{prefix}def score(response):\n    scope = {{}}\n    exec(response, scope)\n"
                "    return scope['value']\n"
            )
            folder = tmp_path_factory.mktemp("rewards")
            pools[prefix] = stack.enter_context(open_pool(folder, source, timeout_s=0.3))
        yield pools


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("1 / 0", ["failed: ZeroDivisionError: division by zero", "<string>:1"]),
        ("raise KeyError('x')", ["failed: KeyError: 'x'"]),
        ("raise TimeoutError", ["failed: TimeoutError"]),
        ("exit(3)", ["failed: SystemExit: 3"]),
        ("raise KeyboardInterrupt", ["failed: KeyboardInterrupt"]),
        ("assert False", ["failed: AssertionError"]),
        ("import asyncio; raise asyncio.CancelledError", ["failed: CancelledError"]),
        ("raise GeneratorExit('x')", ["failed: GeneratorExit: x"]),
        ("raise StopIteration(1)", ["failed: "]),
        ("value = None", ["is None, not a number"]),
        ("value = float('nan')", ["is nan"]),
        ("value = '1'", ["is str '1'"]),
        ("value = [1.0]", ["is list"]),
        ("value = (1.0 for _ in 'a')", ["is generator"]),
        ("while True: pass", ["did not return within reward.timeout_s = 0.3 s", "mine.py:4)"]),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_failing_call_names_prompt_response_and_cause(
    failing: dict[str, RewardPool], prefix: str, body: str, wanted: list[str]
):
    with pytest.raises(UserError) as caught:
        scored(failing[prefix], "value = 1", body)
    for part in ("reward \"python:mine.py:score\" of prompt 'rows.jsonl:7', response 1,", *wanted):
        assert part in str(caught.value)


def test_a_call_that_does_not_return_ends_by_the_limit(failing: dict[str, RewardPool]):
    """verl#6673, verl#288: a busy loop froze the run without a word; here its process is killed."""
    with pytest.raises(
        UserError, match=r"did not return within reward\.timeout_s = 0\.3 s.*this response: 'while True: pass'"
    ):
        scored(failing[""], "while True: pass")
    assert scored(failing[""], "value = 1") == [1.0]
