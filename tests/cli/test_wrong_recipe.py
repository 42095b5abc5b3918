"""A wrong recipe ends in one paragraph and status 2, and before any weight is read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ratoon
from ratoon.attention.impls import ImplStatus
from ratoon.cli.main import main

RECIPE = """\
[run]
name = "r"
output_dir = "{folder}/runs"
[model.fresh]
hidden_size = 32
num_layers = 1
max_positions = 64
alphabet = "abc"
[data]
source = "rows.jsonl"
chat_template = false
[rollout]
max_response_tokens = 8
[reward]
function = "python:reward.py:score"
[trainer]
num_steps = 1
device = "cpu"
"""
ROWS = [{"prompt": letters, "answer": letters[::-1]} for letters in ("ab", "bc", "ca")]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "reward.py").write_text("def score(response):\n    return len(response)\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def refused(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The paragraph that `ratoon train` ends with; loading a model is a failure."""

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded for a recipe that is wrong")

    def call(*overrides: str) -> str:
        monkeypatch.setattr("ratoon.loop.run.load_model", no_model)
        assert main(["train", str(recipe), *overrides]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert_one_paragraph(captured.err)
        return captured.err

    return call


def assert_one_paragraph(text: str) -> None:
    assert text.startswith("ratoon train: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert "Traceback" not in text


def ratoon_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\n"
        "from ratoon.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
        "sys.exit(status)\n"
    )
    source = str(Path(ratoon.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": source, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("[trainer]\nnum_stepz = 4\n", [], ["recipe.toml", "trainer.num_stepz = 4", "Did you mean num_steps"]),
        ("[data]\nsource = x\n", [], ["recipe.toml", "not valid TOML", "line 2"]),
        (None, ["--trainer.num_steps=ten"], ["recipe.toml", "trainer.num_steps = 'ten'", "a whole number"]),
        (None, ["--rollout.group_size", "1"], ["rollout.group_size", "2 or more"]),
        ("", [], ["recipe.toml", "run is missing"]),
    ],
)
def test_wrong_text_is_refused_in_a_process_without_torch(
    recipe: Path, text: str | None, overrides: list[str], words: list[str]
):
    """OpenRLHF#1250: a group of one did nothing, and was taken."""
    if text is not None:
        recipe.write_text(text)
    done = ratoon_command("train", str(recipe), *overrides)
    assert done.returncode == 2
    assert done.stdout.split() == ["False", "False"]
    assert_one_paragraph(done.stderr)
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--modle.path=x"], ["modle", "Did you mean model?"]),
        (["--trainer.learning_rate=fast"], ["trainer.learning_rate = 'fast'", "a number"]),
        (["--trainer.learning_rate=nan"], ["trainer.learning_rate = nan"]),
        (["--trainer.betas=[0.9]"], ["trainer.betas = [0.9] is too short", "a list of 2, each a number"]),
        (["--trainer.betas=[0.9, 'x']"], ["trainer.betas[1] = 'x'", "a list of 2, each a number"]),
        (["--trainer.betas=[0.9, 0.9, 0.9]"], ["trainer.betas = [0.9, 0.9, 0.9]", "a list of 2, each a number"]),
        (["--rollout.stop=[1]"], ["rollout.stop[0] = 1", "a list of strings."]),
        (["--logging.sinks=3"], ["logging.sinks = 3: input should be a list.", "a list of any of 'tensorboard', "]),
        (["--data=3"], ["data = 3: input should be a table.", "a table with source"]),
        (["--model.lora=true"], ["model.lora = True: input should be a table.", "a table with rank"]),
        (["--data.options=x"], ["data.options = 'x': input should be a table."]),
        (
            ["--reward.components={}"],
            ["reward.components = {}: input should be a list.", "a list of tables with extract, "],
        ),
        (
            ["--reward.components=[{}, {}]"],
            ["reward.components[0].function is missing", "reward.components[1].function"],
        ),
        (
            ["--reward.components=[{function='format', wieght=2.0}]"],
            ["reward.components[0].wieght = 2.0 is not a key of [reward.components]", "Did you mean weight?"],
        ),
        (["--trainer.num_steps"], ["--trainer.num_steps", "no value", "--section.key=VALUE"]),
        (["--frehs"], ["--frehs", "ratoon train --help"]),
        (["num_steps=3"], ["num_steps=3", "--section.key=value"]),
        (["--model.path=x"], ["exactly one of `path` and `fresh`, got both"]),
        (["--run.name=../up"], ["run.name = '../up'", "folder name"]),
        (["--run.name=  "], ["run.name", "folder name"]),
        (["--run.name=."], ["run.name", "folder name"]),
        (["--data.source=absent.jsonl"], ["absent.jsonl", "does not exist"]),
        (["--data.prompt_column=question"], ["question", "rows.jsonl"]),
        (["--data.answer_column=solution"], ["solution", "rows.jsonl"]),
        (["--data.max_prompt_tokens=1"], ["data.max_prompt_tokens = 1", "2 tokens"]),
        (["--data.num_heldout=3"], ["data.num_heldout = 3", "nothing to train on"]),
        (["--data.source=reasoning-gym:no_such_task", "--data.size=3"], ["no_such_task"]),
        (["--rollout.max_response_tokens=100"], ["model.fresh.max_positions = 64", "rollout.max_response_tokens"]),
        (["--planner.max_rows_per_microbatch=5"], ["planner.max_rows_per_microbatch = 5"]),
        (["--reward.function=python:absent.py:score"], ["reward.function", "absent.py", "does not exist"]),
        (["--reward.function=python:reward.py:scores"], ["scores", "does not exist", "score"]),
        (["--reward.function=python:reward.py"], ["reward.function", "python:FILE.py:FUNCTION"]),
        (["--reward.function=reasoning-gym"], ["reward.function", "reasoning-gym", "rows.jsonl"]),
        (["--sft.demonstrations=column:absent"], ["sft.demonstrations", "absent"]),
        (["--sft.demonstrations=python:absent.py:show"], ["sft.demonstrations", "absent.py"]),
        (["--run.output_dir=/proc/nowhere"], ["/proc/nowhere/r", "run.output_dir"]),
        (["--run.output_dir=/dev/null"], ["/dev/null/r", "run.output_dir"]),
    ],
)
def test_wrong_value_is_refused_before_a_model_loads(
    refused: Callable[..., str], overrides: list[str], words: list[str]
):
    message = refused(*overrides)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('{"prompt": "ab", "answer": "b"}\n{"prompt": \n', ["rows.jsonl", "2"]),
        ('{"prompt": "ab", "answer": "b"}\n[1]\n', ["rows.jsonl", "2"]),
        ('{"prompt": "ab", "answer": "b"}\n{"prompt": "", "answer": "b"}\n', ["rows.jsonl", "2"]),
        ('{"prompt": "ab", "answer": "b"}\n{"prompt": 7, "answer": "b"}\n', ["rows.jsonl", "2", "text"]),
        ('{"prompt": "ab", "answer": "b"}\n{"answer": "b"}\n', ["rows.jsonl", "2", "prompt"]),
        ("", ["rows.jsonl"]),
    ],
)
def test_wrong_rows_are_named_by_file_and_row(recipe: Path, refused: Callable[..., str], rows: str, words: list[str]):
    (recipe.parent / "rows.jsonl").write_text(rows)
    message = refused()
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module\n", ["reward.py:1", "ModuleNotFoundError"]),
        ("def score(response)\n", ["reward.py:1", "SyntaxError"]),
        ("raise ValueError('two\\nlines')\n", ["reward.py:1", "ValueError: two lines"]),
        ("def score(response, colour): ...\n", ["colour", "Parameters can be"]),
        ("score = 3\n", ["score", "is not a function"]),
    ],
)
def test_wrong_reward_file_is_named_by_line(recipe: Path, refused: Callable[..., str], code: str, words: list[str]):
    (recipe.parent / "reward.py").write_text(code)
    message = refused()
    for word in words:
        assert word in message


@pytest.mark.parametrize("path", ["no/such/folder", "HuggingFaceTB/SmolLM2-135M"])
def test_absent_model_folder_is_refused_and_no_hub_is_asked(recipe: Path, refused: Callable[..., str], path: str):
    text = recipe.read_text()
    start, end = text.index("[model.fresh]"), text.index("[data]")
    recipe.write_text(text[:start] + f'[model]\npath = "{path}"\n' + text[end:])
    message = refused()
    assert path in message
    assert "folder" in message


@pytest.mark.parametrize("impl", ["triton", "flex"])
def test_attention_that_cannot_run_here_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, impl: str
):
    found = [
        ImplStatus(name=impl, impl=impl, provider="p", is_available=False, reason="no GPU"),
        ImplStatus(name="reference", impl="reference", provider="eager", is_available=True, reason=""),
    ]
    monkeypatch.setattr("ratoon.loop.inputs.available_impls", lambda: found)
    message = refused(f"--model.attention={impl}")
    assert f'model.attention = "{impl}"' in message
    assert "no GPU" in message
    assert '"reference"' in message


def test_cuda_is_refused_where_there_is_none(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert 'trainer.device = "cuda"' in refused("--trainer.device=cuda")


def test_half_a_launcher_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """Variables that a scheduler left, or that somebody has set by hand."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused()
    assert "RANK, MASTER_ADDR, MASTER_PORT are missing beside WORLD_SIZE" in message
    assert "torchrun" in message


def test_refused_recipe_leaves_no_run_folder(recipe: Path, refused: Callable[..., str]):
    refused("--data.source=absent.jsonl")
    assert not (recipe.parent / "runs").exists()
