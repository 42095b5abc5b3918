"""`ratoon eval`: a run's checkpoint or any model folder, on the run's prompts or any others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.loop.tiny_run import WORDS, metrics_rows, write_tiny_recipe

from ratoon.cli.main import main

Eval = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny recipe and its run of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_recipe(folder)
    options = ["--evaluation.every_steps=2", "--evaluation.group_size=2", "--evaluation.pass_threshold=0.5"]
    assert main(["train", str(folder / "recipe.toml"), *options]) == 0
    return folder


@pytest.fixture
def run(trained: Path) -> Path:
    return trained / "runs" / "tiny"


@pytest.fixture
def evaluate(trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Eval:
    """`ratoon eval ARGUMENTS`, started in the recipe's folder."""
    monkeypatch.chdir(trained)

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["eval", *map(str, arguments)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    return tmp_path / "model"


def test_run_is_evaluated_as_the_run_itself_does(run: Path, evaluate: Eval):
    """Same weights, prompts and draws: the very figures of the last evaluation in training."""
    status, out, err = evaluate(run, "--json")
    assert status == 0, err
    found, last = json.loads(out), metrics_rows(run, "evaluate")[-1]
    assert last["step"] == 6
    shared = found.keys() & last.keys()
    assert {"reward_mean", "reward_standard_error", "pass_at_1", "pass_at_2_low", "truncated_fraction"} <= shared
    assert {name: found[name] for name in shared} == {name: last[name] for name in shared}
    assert found["model"] == str(run / "checkpoints" / "step-000006")
    assert "held out" in found["data"]


def test_best_checkpoint_and_any_other(run: Path, evaluate: Eval):
    rows = {row["step"]: row for row in metrics_rows(run, "evaluate") if row["step"] > 0}
    best = max(rows, key=lambda step: (rows[step]["reward_mean"], -step))
    status, out, _ = evaluate(run, "--best", "--json")
    assert status == 0
    assert json.loads(out)["reward_mean"] == rows[best]["reward_mean"]
    status, out, _ = evaluate(run / "checkpoints" / "step-000002", "--json")
    assert status == 0
    assert json.loads(out)["reward_mean"] == rows[2]["reward_mean"]


def test_page_for_people(run: Path, evaluate: Eval):
    status, out, _ = evaluate(run)
    assert status == 0
    for words in ("mean reward", "±", "pass@1", "pass@2", "95 %:", "truncated", "a reward of at least 0.5", "held out"):
        assert words in out


def test_one_prompt_has_no_error_to_tell_of(run: Path, evaluate: Eval):
    status, out, err = evaluate(run, "--limit", 1)
    assert status == 0, err
    assert "1 prompt, " in out and "mean reward" in out
    assert "nan" not in out


def test_other_data_and_every_response_written(run: Path, evaluate: Eval, trained: Path, tmp_path: Path):
    rows = [json.dumps({"prompt": word, "answer": "a"}) for word in ("ab", "cd", "ef", "gh")]
    (tmp_path / "other.jsonl").write_text("\n".join(rows) + "\n")
    out_file = tmp_path / "out.parquet"
    status, out, err = evaluate(run, "--data", tmp_path / "other.jsonl", "--limit", 3, "--out", out_file, "--json")
    assert status == 0, err
    table = pq.read_table(out_file).to_pylist()
    assert [row["prompt"] for row in table] == ["ab", "ab", "cd", "cd", "ef", "ef"]
    assert json.loads(out)["reward_mean"] == pytest.approx(sum(row["reward"] for row in table) / 6)
    assert {row["step"] for row in table} == {6}


def test_model_folder_with_data_and_reward(model: Path, evaluate: Eval, tmp_path: Path):
    out_file = tmp_path / "out.jsonl"
    arguments = ["--data", "words.jsonl", "--reward", "python:reward.py:score", "--data.chat_template=false"]
    limits = ["--evaluation.temperature=0", "--rollout.max_response_tokens=6", "--trainer.device=cpu"]
    status, out, err = evaluate(model, *arguments, *limits, "--out", out_file, "--json")
    assert status == 0, err
    assert json.loads(out)["num_responses"] == len(WORDS)
    assert len([json.loads(line) for line in out_file.read_text().splitlines()]) == len(WORDS)


def test_model_folder_with_a_recipe(model: Path, evaluate: Eval, trained: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of the recipe are found beside it, wherever the command is started."""
    monkeypatch.chdir(model)
    status, out, err = evaluate(model, "--recipe", trained / "recipe.toml", "--json")
    assert status == 0, err
    assert json.loads(out)["num_responses"] == len(WORDS)


def test_reward_of_ones_own_on_a_run(run: Path, evaluate: Eval, trained: Path):
    (trained / "other_reward.py").write_text("print('loaded')\ndef score(response):\n    return 2.5\n")
    status, out, err = evaluate(run, "--reward", "python:other_reward.py:score", "--json", "--reward.num_workers=1")
    assert (status, err) == (0, "loaded\n"), "what a reward prints is shown, apart from the result"
    assert json.loads(out)["reward_mean"] == 2.5


def test_run_with_adapters(evaluate: Eval, tmp_path: Path):
    write_tiny_recipe(tmp_path)
    assert main(["train", str(tmp_path / "recipe.toml"), "--trainer.num_steps=1", "--model.lora.rank=2"]) == 0
    run = tmp_path / "runs" / "tiny"
    status, out, err = evaluate(run, "--json")
    assert status == 0, err
    assert json.loads(out)["reward_mean"] == metrics_rows(run, "evaluate")[-1]["reward_mean"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["nowhere is not a folder", "runs/NAME"]),
        (["EMPTY"], ["neither a run", "nor a model"]),
        (["/"], ["neither a run", "nor a model"]),
        (["MODEL"], ["model folder", "no data and no reward", "--data and --reward", "--recipe"]),
        (["MODEL", "--data", "words.jsonl"], ["no reward", "--reward"]),
        (["MODEL", "--best", "--data", "words.jsonl"], ["--best", "no run folder"]),
        (["RUN", "--data", "absent.jsonl"], ["absent.jsonl"]),
        (["RUN", "--data", "reasoning-gym:chain_sum"], ["data.size"]),
        (["RUN", "--reward", "python:absent.py:score"], ["absent.py"]),
        (["RUN", "--reward", "magic"], ["magic", "exact-match"]),
        (["RUN", "--evaluation.tempreature=0"], ["tempreature", "Did you mean temperature?", "recipe.toml"]),
        (["RUN", "--evaluation.temperature=0"], ["evaluation.group_size is 2", "all answers to a prompt are the same"]),
        (["RUN", "--out", "answers.txt"], [".parquet or .jsonl"]),
        (["RUN", "--out", "words.jsonl"], ["words.jsonl exists"]),
        (["RUN", "--out", "absent/a.jsonl"], ["folder absent does not exist"]),
        (["RUN", "--recipe", "absent.toml"], ["absent.toml: no such recipe file"]),
    ],
)
def test_what_the_user_must_change_is_one_paragraph(
    arguments: list[str], words: list[str], run: Path, evaluate: Eval, tmp_path: Path, request: pytest.FixtureRequest
):
    places = {"RUN": run, "EMPTY": tmp_path}
    if "MODEL" in arguments:
        places["MODEL"] = request.getfixturevalue("model")
    status, out, err = evaluate(*(places.get(argument, argument) for argument in arguments))
    assert status == 2
    assert out == ""
    for word in words:
        assert word in err
    assert err.startswith("ratoon eval: ")
    assert err.count("\n") == 1
    assert "ratoon-eval-" not in err


def test_prompt_that_the_model_cannot_hold_is_named(run: Path, evaluate: Eval, tmp_path: Path):
    """It fails in a group of concurrent tasks, and is still one paragraph."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 60, "answer": "a"}) + "\n")
    status, _, err = evaluate(run, "--data", tmp_path / "long.jsonl")
    assert status == 2
    assert "long.jsonl" in err
    assert "Traceback" not in err


def test_cache_that_is_too_small_is_refused_before_a_model_loads(
    run: Path, model: Path, trained: Path, evaluate: Eval, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ratoon.loop.model_evaluation.load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    for arguments in ((run,), (model, "--recipe", trained / "recipe.toml")):
        status, _, err = evaluate(*arguments, "--rollout.cache_tokens=1")
        assert status == 2 and "needs 32 cache tokens, over rollout.cache_tokens=1" in err, err


def test_run_finds_its_files_from_any_folder_also_moved(
    run: Path, evaluate: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "elsewhere" / "copy")
    for folder in (run, Path("elsewhere/copy"), Path("elsewhere/copy/checkpoints/step-000006")):
        status, out, err = evaluate(folder, "--json")
        assert status == 0, err
        assert json.loads(out)["reward_mean"] == metrics_rows(run, "evaluate")[-1]["reward_mean"]


def test_recipe_in_a_run_folder_finds_the_files_of_the_first(
    run: Path, evaluate: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(run / "recipe.toml")]) == 0
    assert evaluate(run, "--recipe", run / "recipe.toml")[0] == 0


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ('{"recipe_dir": "/no/such/folder"}', ["/no/such/folder", "is gone", "relative to the current folder"]),
        pytest.param("{}", ["relative to the current folder"], marks=pytest.mark.full),
        pytest.param(None, ["relative to the current folder"], marks=pytest.mark.full),
        ("HERE", ["relative to /", "where it was"]),
    ],
)
def test_run_whose_files_are_not_found_says_where_they_are_looked_for(
    origin: str | None, words: list[str], run: Path, evaluate: Eval, trained: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "origin.json").unlink()
    if origin is not None:
        (copy / "origin.json").write_text(json.dumps({"recipe_dir": str(tmp_path)}) if origin == "HERE" else origin)
    if origin != "HERE":
        assert evaluate(copy)[0] == 0, "started in the folder of the recipe"
    monkeypatch.chdir(tmp_path)
    status, _, err = evaluate(copy)
    assert status == 2
    assert "words.jsonl does not exist" in err
    for word in words:
        assert word in err
    assert ("--recipe" in err) == (origin != "HERE")
    assert evaluate(copy, "--recipe", trained / "recipe.toml")[0] == 0


def test_damaged_checkpoint_is_refused(run: Path, evaluate: Eval, tmp_path: Path):
    """One bit of a weight: it loads, and measures another model."""
    copy = tmp_path / "run" / "checkpoints" / "step-000006"
    shutil.copytree(run / "checkpoints" / "step-000006", copy)
    shutil.copy(run / "recipe.toml", tmp_path / "run")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-40] ^= 0x40
    (copy / "model.safetensors").write_bytes(weights)
    status, out, err = evaluate(copy)
    assert (status, out) == (2, "")
    assert "step-000006 is damaged: model.safetensors has other contents" in err


def test_run_without_a_checkpoint(run: Path, evaluate: Eval, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "recipe.toml", bare)
    status, _, err = evaluate(bare)
    assert status == 2
    assert "no finished checkpoint" in err
