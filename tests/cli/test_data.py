"""`ratoon data check` reads tokenizer and data as a run would, and no model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ratoon.cli.main import main
from ratoon.models import FreshModelConfig, build_fresh

RECIPE = """\
run.name = "r"
model = { path = "model" }
data = { source = "rows.jsonl", num_heldout = 1, chat_template = false }
reward.function = "exact-match"
rollout = { group_size = 4, max_response_tokens = 40 }
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `ratoon data check` prints; standard error where it is refused."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"prompt": "a" * length, "answer": "b"} for length in (20, 5, 11, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = build_fresh(FreshModelConfig(num_layers=1, alphabet="abc\n"), 0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded to look at the data")

    capsys.readouterr()  # saving draws a bar

    def call(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_model)
        assert main(["data", "check", "recipe.toml", *arguments]) == status
        captured = capsys.readouterr()
        assert (captured.out == "") == (status == 2)
        return captured.err if status else captured.out

    return call


def test_the_report_and_examples_are_printed(check: Callable[..., str]):
    shown = check()
    assert shown.startswith("rows.jsonl: 4 rows, removed 1 duplicates; 2 to train on, 1 held out\n")
    assert "prompt tokens: 5 to 20, median 11, p90 20, p99 20\n" in shown
    assert "dedup ratio to expect with rollout.group_size = 4: " in shown
    assert "with responses of 40 tokens, " in shown
    assert "with responses of 10 tokens\n" in shown
    places = [shown.index(f"{id}, {count} tokens, answer 'b'\n  | {'a' * count}\n") for id, count in
              (("rows.jsonl:2", 5), ("rows.jsonl:3", 11), ("rows.jsonl:1", 20))]  # fmt: skip
    assert places == sorted(places)


def test_examples_are_limited_and_long_ones_cut(check: Callable[..., str]):
    assert check("--examples", "1").count("  | ") == 1
    Path("rows.jsonl").write_text('{"prompt": "' + "a\\n" * 3_000 + '"}\n')
    shown = check("--data.answer_column", "", "--data.num_heldout=0", "--reward.function=format")
    assert "no answer\n  | a\n  | a\n" in shown
    assert "\n  ... and 4,000 more characters\n" in shown


def test_special_tokens_are_shown_as_the_policy_reads_them(check: Callable[..., str]):
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    settings["chat_template"] = "<eos>{{ messages[0]['content'] }}b"
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    assert "rows.jsonl:2, 7 tokens, answer 'b'\n  | <eos>aaaaab\n" in check("--data.chat_template=true")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--data.source=absent.jsonl"], ["absent.jsonl does not exist", "rows.jsonl"]),
        (
            ["--data.max_prompt_tokens=10"],
            ["2 of 3 prompts", "data.max_prompt_tokens = 10", "rows.jsonl:1 (20 tokens)"],
        ),
        (["--data.chat_template=true"], ["no chat template"]),
        (["--data.prompt_column=q"], ["line 1", 'no column "q"']),
        (["--data.sources=[{source='a.csv'}]"], ["[data] needs either source or"]),
        (["--model.path=absent"], ["absent"]),
    ],
)
def test_what_is_wrong_is_one_paragraph(check: Callable[..., str], overrides: list[str], words: list[str]):
    message = check(*overrides, status=2)
    assert message.startswith("ratoon data: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def score(response, biggest, prompt): return biggest", []),
        ("def score(response, bigest): return 1", ['asks for "bigest"', 'did you mean "biggest"']),
        ("def scor(response): return 1", ["score() in", "does not exist"]),
    ],
)
def test_the_reward_is_asked_whether_it_can_score_the_data(
    check: Callable[..., str], capsys: pytest.CaptureFixture[str], source: str, words: list[str]
):
    Path("rows.jsonl").write_text('{"prompt": "ab", "biggest": 7}\n{"prompt": "ba", "biggest": 8}\n')
    Path("mine.py").write_text(source)
    status = main(
        ["data", "check", "recipe.toml", "--data.answer_column=biggest", "--reward.function=python:mine.py:score"]
    )
    shown = capsys.readouterr()
    assert "prompt 1 of 2: rows.jsonl:" in shown.out, "the report stands there in either case"
    assert status == (2 if words else 0) and bool(shown.err) == bool(words)
    for word in words:
        assert word in shown.err


@pytest.mark.parametrize("num_bad", [3, 25])
def test_all_bad_rows_are_counted_and_twenty_shown(check: Callable[..., str], num_bad: int):
    rows = [{"prompt": "a" * (i + 1), "answer": "b" if i % 2 else None} for i in range(2 * num_bad)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *shown, last = check(status=2).splitlines()
    assert len(shown) == min(num_bad, 20)
    assert all(f"line {2 * i + 1}: " in line and '"answer" must be text' in line for i, line in enumerate(shown))
    assert last.startswith(f"ratoon data: {num_bad} of {2 * num_bad} rows are bad")
    assert ("the first 20 are shown" in last) == (num_bad > 20)
    assert "1 held out" in check("--data.bad_rows=drop")


def test_sources_come_from_tables_of_the_recipe(check: Callable[..., str]):
    Path("recipe.toml").write_text(
        'run.name = "r"\nmodel.path = "model"\nreward.function = "exact-match"\n[data]\nchat_template = false\n'
        '[[data.sources]]\nsource = "rows.jsonl"\nweight = 3.0\n'
        '[[data.sources]]\nsource = "b.csv"\nweight = 1.0\n'
    )
    Path("b.csv").write_text("prompt,answer\nab,c\nba,c\n")
    shown = check()
    assert "rows.jsonl: 4 rows, removed 1 duplicates; 3 to train on, 0 held out\n" in shown
    assert "b.csv: 2 rows; 2 to train on, 0 held out\n" in shown
    assert "rows.jsonl: 75.0% of the prompts trained on; each comes 2 times" in shown
    Path("b.csv").write_text("prompt\nab\n")
    assert 'b.csv, line 2: no column "answer"' in check(status=2)


def test_check_needs_a_recipe(capsys: pytest.CaptureFixture[str]):
    for arguments in (["data"], ["data", "check"], ["data", "chekc", "x.toml"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        assert "usage: ratoon data" in capsys.readouterr().err
