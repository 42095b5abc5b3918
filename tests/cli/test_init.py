"""`ratoon init`: every recipe that it writes loads and can be planned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ratoon.cli.main import main
from ratoon.cli.recipe_templates import TASKS
from ratoon.config import load_recipe
from ratoon.metrics import read_metrics
from ratoon.models import build_fresh
from ratoon.models.config import FreshModelConfig


def init(*arguments: object) -> int:
    return main(["init", *map(str, arguments)])


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_loads_and_explains_itself(task: str, machine: str, tmp_path: Path):
    out = tmp_path / "my run.toml"
    assert init(out, "--task", task, "--machine", machine) == 0
    recipe = load_recipe(out)
    assert recipe.run.name == "my-run"
    assert recipe.trainer.device == ("cuda" if machine == "gpu" else "cpu")
    text = out.read_text()
    assert f"{recipe.rollout.prompts_per_step} prompts x {recipe.rollout.group_size} responses" in text
    assert max(len(line) for line in text.splitlines()) <= 120
    comments = sum("#" in line for line in text.splitlines())
    assert comments >= 20


@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_can_be_planned_as_it_is(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    out = tmp_path / "r.toml"
    assert init(out, "--task", task, "--machine", "cpu") == 0
    # the templates' run folders are relative to the current folder
    assert main(["plan", str(out), f"--run.output_dir={tmp_path}/runs"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "a new run" in shown
    assert "warning" not in shown


def test_example_answers_are_right_by_the_written_reward(tmp_path: Path):
    """The skeleton scores its own example rows' answers 1, and others less."""
    assert init(tmp_path / "r.toml", "--task", "own-reward", "--machine", "cpu") == 0
    names: dict[str, Any] = {}
    exec((tmp_path / "rewards.py").read_text(), names)
    for line in (tmp_path / "data.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert names["score"](response=answer, answer=answer) == 1.0
        assert names["score"](response="no", answer=answer) < 1.0


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rewards.py").write_text("mine")
    assert init(tmp_path / "r.toml", "--task", "own-reward", "--machine", "cpu") == 2
    shown = capsys.readouterr().err
    assert "rewards.py exists already" in shown
    assert "--force" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rewards.py"]
    assert init(tmp_path / "r.toml", "--task", "own-reward", "--machine", "cpu", "--force") == 0
    assert "def score" in (tmp_path / "rewards.py").read_text()


def test_own_data_is_named_and_no_example_is_written(tmp_path: Path):
    rows = "".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(70))
    (tmp_path / "mine.jsonl").write_text(rows)
    assert init(tmp_path / "r.toml", "--task", "qa", "--machine", "cpu", "--data", "mine.jsonl") == 0
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.data.source == "mine.jsonl"
    assert recipe.data.num_heldout == 7
    assert recipe.sft is None, "the warm start belongs to the example"
    assert not (tmp_path / "qa.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["a .toml file"]),
        (["recipe"], ["a .toml file", "'recipe'"]),
        (["{}/r.toml", "--task", "reasoning-gym", "--data", "x.jsonl"], ["--data", "reasoning-gym"]),
        (["{}/r.toml", "--gguf-file", "x.gguf"], ["--model"]),
        (["{}/r.toml", "--answer-column", "x"], ["--answer-column", "--data"]),
        (["{}/r.toml", "--data", "absent.jsonl"], ["absent.jsonl does not exist"]),
        (["{}/r.toml", "--memory-gib", "-1"], ["--memory-gib"]),
        (["{}/absent/r.toml", "--machine", "cpu"], ["cannot be written"]),
        (["{}/r.toml", "--machine", "cpu", "--model", "{}/absent"], ["does not exist"]),
    ],
)
def test_wrong_options_are_one_paragraph(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert init(*(argument.format(tmp_path) for argument in arguments)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ratoon init: ")
    assert shown.count("\n") == 1
    for word in words:
        assert word in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("row", "options", "columns"),
    [
        ({"Question": "q 0 ?", "answer": "1"}, [], ("Question", "answer")),
        ({"problem": "p 0", "solution": "long", "answer": 3}, [], ("problem", "answer")),
        (
            {"q": "p 0", "extra": {"truth": "7"}},
            ["--prompt-column=q", "--answer-column=extra.truth"],
            ("q", "extra.truth"),
        ),
        ({"prompt": "p 0 " * 400, "answer": "1"}, [], ("prompt", "answer")),
        ({"question": "p 0"}, ["--task=own-reward"], ("question", "")),
    ],
)
def test_own_data_as_it_is_can_be_planned(
    row: dict[str, Any],
    options: list[str],
    columns: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    rows = (json.dumps(row).replace("0", str(index)) + "\n" for index in range(1, 40))
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    assert init(tmp_path / "r.toml", "--machine=cpu", "--data=mine.jsonl", *options) == 0, capsys.readouterr().err
    data = load_recipe(tmp_path / "r.toml").data
    assert (data.prompt_column, data.answer_column) == columns
    # the templates' run folders are relative to the current folder
    assert main(["plan", str(tmp_path / "r.toml"), f"--run.output_dir={tmp_path}/runs"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"q": "x", "answer": "1"}, ["called like a prompt: answer, q;", "--prompt-column"]),
        ({"prompt": "x", "a": "1"}, ["called like an answer: a, prompt;", "--answer-column"]),
        ({"prompt": 3, "answer": "1"}, ['"prompt" must be text', "line 1"]),
        ({"messages": [{"role": "user", "content": "x"}], "answer": "1"}, ["conversations", "chat model with --model"]),
    ],
)
def test_what_own_data_lacks_is_named(
    row: dict[str, Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    assert init(tmp_path / "r.toml", "--machine", "cpu", "--data", "mine.jsonl") == 2
    shown = capsys.readouterr().err
    for word in words:
        assert word in shown
    assert not (tmp_path / "r.toml").exists()


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_learns_as_it_is(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    assert init("r.toml", "--task", task, "--machine", "cpu") == 0
    assert load_recipe(Path("r.toml")).data.num_heldout >= 32
    assert main(["train", "r.toml"]) == 0
    rows = read_metrics("runs/r/metrics.jsonl")
    rewards = [float(str(row.values["reward_mean"])) for row in rows if row.phase == "evaluate"]
    assert rewards[-1] > rewards[0] + 0.1


def test_list_names_every_task(capsys: pytest.CaptureFixture[str]):
    assert init("--list") == 0
    shown = capsys.readouterr().out
    for name, task in TASKS.items():
        assert name in shown
        assert task.purpose in shown


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    model, tokenizer = build_fresh(FreshModelConfig(hidden_size=64, num_layers=8), seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("has_template", [False, True])
def test_model_folder_decides_the_model_table(model_folder: Path, tmp_path: Path, has_template: bool):
    if has_template:
        (model_folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert init(tmp_path / "r.toml", "--machine", "gpu", "--model", model_folder, "--memory-gib", 100) == 0
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.model.path == str(model_folder)
    assert recipe.model.dtype == "bfloat16"
    assert recipe.model.recompute == "auto"
    assert "at these rows probably none" in (tmp_path / "r.toml").read_text()
    assert recipe.planner.max_rows_per_microbatch == 32_768
    assert recipe.data.chat_template is has_template


def test_little_memory_recomputes_more_then_takes_fewer_rows_then_warns(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    choices: list[tuple[str, int]] = []
    for gib in (100.0, 1.4, 0.9, 0.5, 0.001):
        arguments = ("--machine", "cpu", "--model", model_folder, "--memory-gib", gib, "--force")
        assert init(tmp_path / "r.toml", *arguments) == 0
        recipe = load_recipe(tmp_path / "r.toml")
        found = re.search(r"at these rows probably (\w+)", (tmp_path / "r.toml").read_text())
        assert found is not None
        choices.append((found[1], recipe.planner.max_rows_per_microbatch))
        assert ("warning" in capsys.readouterr().err) == (gib == 0.001)
    order = ["none", "selective", "full"]
    ranks = [(order.index(recompute), -rows) for recompute, rows in choices]
    assert ranks == sorted(ranks)
    assert choices[0] == ("none", 32_768)
    assert choices[-1] == ("full", 4_096)
    assert len(set(choices)) >= 4
