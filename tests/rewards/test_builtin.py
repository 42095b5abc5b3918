"""The built-in verifiers, as workers run them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.pools import open_pool, rewards_of

from ratoon.data import DataConfig
from ratoon.data.generators import generate_rows
from ratoon.rewards import RewardPool
from ratoon.rewards.components import ComponentSpec, PromptText
from ratoon.rewards.mathematics import MathVerify
from ratoon.rewards.scorers import ExactMatch, Format, Regex, Scorer
from ratoon.types import Prompt, Response, RolloutGroup, UserError


def spec(function: str, **options: Any) -> ComponentSpec:
    defaults: dict[str, Any] = {"extract": "text", "pattern": "", "match": "search", "tags": ("think", "answer")}
    return ComponentSpec(name="r", key="reward.function", function=function, **{**defaults, **options})


def scores(scorer: Scorer, answer: str | None, *texts: str, prompt: str = "question") -> list[Any]:
    """Without a worker in between."""
    side = PromptText("p7", prompt, answer, {})
    scorer.check(side)
    return [scorer(side, text) for text in texts]


def make_group(prompt: Prompt, *texts: str) -> RolloutGroup:
    return RolloutGroup(prompt, tuple(Response(np.array([1]), text=text) for text in texts))


@pytest.fixture(scope="module")
def gym() -> Iterator[RewardPool]:
    """reasoning-gym's verifiers with each way to extract; a worker takes seconds to import the package."""
    pytest.importorskip("reasoning_gym")
    ways = ("text", "last-number", "answer-tag")
    components = [{"function": "reasoning-gym", "name": way.replace("-", "_"), "extract": way} for way in ways]
    with open_pool(Path(), components=components) as pool:
        yield pool


def rewards(gym: RewardPool, prompt: Prompt, *texts: str, extract: str = "text") -> list[float]:
    (group,) = gym.score_now([make_group(prompt, *texts)]).groups
    return group.reward_components[extract.replace("-", "_")].tolist()


def answered(answer: str | None) -> Prompt:
    return Prompt("p7", np.array([1]), "question", answer)


def generated(name: str, options: dict[str, Any] | None = None, index: int = 0) -> Prompt:
    pytest.importorskip("reasoning_gym")
    row = generate_rows(name, options or {}, size=index + 1, seed=0)[index]
    return Prompt(row.id, np.array([1]), row.prompt_text, row.answer, row.metadata)


@pytest.mark.parametrize(
    ("extract", "answer", "texts", "wanted"),
    [
        ("text", "Paris", ["Paris", " Paris\n", "paris", "Paris.", ""], [1, 1, 0, 0, 0]),
        ("text", "", ["", "x"], [1, 0]),
        ("last-number", "1,234.50", ["it is 1234.5", "1234.50!", "1235", "none"], [1, 1, 0, 0]),
        ("last-number", "#### 72", ["72", "72.0", "144/2", "7.2e1", "27"], [1, 1, 1, 1, 0]),
        ("last-number", "0", ["0", "-0", "0/5", "", "3/0"], [1, 1, 1, 0, 0]),
        ("last-number", "9" * 100, ["9" * 100, "9" * 99], [1, 0]),
        ("boxed", "7", [r"\boxed{7}", r"\boxed{ 7 }", "7", r"\boxed{6} \boxed{8}"], [1, 1, 0, 0]),
        ("boxed", r"so it is \boxed{\frac{1}{2}}.", [r"\boxed{\frac{1}{2}}", r"\boxed{\frac12}"], [1, 0]),
        ("answer-tag", "7", ["<answer>7</answer>", "<answer> 7 </answer>", "7", "<answer>8</answer>"], [1, 1, 0, 0]),
    ],
)
def test_exact_match(extract: str, answer: str, texts: list[str], wanted: list[float]):
    assert scores(ExactMatch(spec("exact-match", extract=extract)), answer, *texts) == wanted


def test_exact_match_needs_answers_that_can_be_matched(tmp_path: Path):
    with open_pool(tmp_path, function="exact-match") as pool:
        with pytest.raises(UserError, match=r"needs answers, but prompt 'p7' has none; set data\.answer_column"):
            pool.check([*[answered("a")] * 600, answered(None)])
        with pytest.raises(UserError, match="needs answers"):
            pool.score_now([make_group(answered(None), "x")])
    with open_pool(tmp_path, function="exact-match", extract="last-number", on_failure="zero") as pool:
        with pytest.raises(UserError, match="answer of prompt 'p7' holds no number: 'seven'"):
            pool.check([answered("7"), answered("seven")])
        pool.check([answered("7")])
        with pytest.raises(UserError, match="holds no number"):
            pool.score_now([make_group(answered("seven"), "x")])


@pytest.mark.parametrize(
    ("options", "texts", "wanted"),
    [
        ({"pattern": r"\d+ apples"}, ["5 apples", "I see 12 apples!", "apples"], [1, 1, 0]),
        ({"pattern": r"\d+", "match": "full"}, ["5", "5 apples", " 5 "], [1, 0, 1]),
        ({"pattern": r"^Step", "extract": "answer-tag"}, ["<answer>Step</answer>", "Step", "a"], [1, 0, 0]),
        ({"pattern": "a.b"}, ["a\nb", "a-b"], [0, 1]),
        ({"pattern": "(?s)a.b"}, ["a\nb"], [1]),
    ],
)
def test_regex(options: dict[str, Any], texts: list[str], wanted: list[float]):
    assert scores(Regex(spec("regex", **options)), None, *texts) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" \n<think>\na\n</think>\n\n<answer></answer>\n", 1),
        ("<think>a</think><answer>b</answer>.", 0),
        ("Well: <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
        ("</think><think><answer>b</answer>", 0),
        ("<Think>a</Think><answer>b</answer>", 0),
        ("a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format(text: str, wanted: float):
    assert scores(Format(spec("format")), None, text) == [wanted]


def test_format_knows_prompts_that_open_the_first_tag():
    """Chat templates of reasoning models end in it."""
    texts = ("a</think><answer>b</answer>", "<think>a</think><answer>b</answer>")
    assert scores(Format(spec("format")), None, *texts, prompt="<user>1+1<assistant><think>\n") == [1, 0]


tags = st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " "])


@given(st.lists(tags, max_size=8).map("".join))
def test_format_agrees_with_a_regular_expression(text: str):
    wanted = re.fullmatch(r"\s*<a>((?!</?[ab]>).)*</a>\s*<b>((?!</?[ab]>).)*</b>\s*", text) is not None
    loose = re.fullmatch(r"\s*<a>((?!</?a>).)*</a>\s*<b>((?!</?b>).)*</b>\s*", text) is not None
    (score,) = scores(Format(spec("format", tags=("a", "b"))), None, text)
    assert score <= loose
    assert score or not wanted


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<answer>", "<", " ", "<think></think>"])
def test_format_reads_a_long_degenerate_response_in_linear_time(piece: str):
    """verl#6673, InternBootcamp#15."""
    assert scores(Format(spec("format")), None, piece * (1_000_000 // len(piece))) == [0]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("42", ["42", "it is 42.", r"\boxed{42}", "$42.0$", r"$\frac{84}{2}$"], ["43", "none", ""]),
        (r"\frac{1}{2}", ["1/2", "0.5", r"$\frac{2}{4}$", r"\boxed{\frac12}"], ["2", "1", r"$\frac{1}{3}$"]),
        (r"2\sqrt{3}", [r"$2\sqrt{3}$", r"$\sqrt{12}$"], ["2", "3", r"$3\sqrt{2}$"]),
        ("x^2+1", ["$1+x^2$"], ["$x^2$", "1"]),
        (r"(3, \frac{1}{2}]", [r"$(3, 0.5]$"], ["$(3, 0.5)$", "3"]),
        (r"\left(\frac{3}{4}, 5\right)", [r"$(0.75, 5)$"], ["5", "3/4"]),
        ("Thus we have #### 1,234", ["1234", "$1234$"], ["1,235"]),
        ("-7", ["-7", "$-7$"], ["7"]),
    ],
)
def test_math_verify_compares_by_value(answer: str, right: list[str], wrong: list[str]):
    pytest.importorskip("math_verify")
    scorer = MathVerify(spec("math-verify"), timeout_s=30.0)
    assert scores(scorer, answer, *right, *wrong) == [1.0] * len(right) + [0.0] * len(wrong)


def test_math_verify_reads_bare_latex_in_tags():
    pytest.importorskip("math_verify")
    scorer = MathVerify(spec("math-verify", extract="answer-tag"), timeout_s=30.0)
    texts = (r"<answer>2\sqrt{3}</answer>", r"<answer>$\sqrt{12}$</answer>", r"2\sqrt{3}", "<answer>2</answer>")
    assert scores(scorer, r"2\sqrt{3}", *texts) == [1, 1, 0, 0]


def test_math_verify_in_a_worker(tmp_path: Path):
    """What its parser cannot digest scores 0, is counted, and kills no worker in vain."""
    pytest.importorskip("math_verify")
    with open_pool(tmp_path, function="math-verify", timeout_s=8.0, on_failure="zero") as pool:
        pool.check([answered("1"), answered(r"\frac{1}{2}")])
        for bad, wanted in ((None, "needs answers"), ("hello", "cannot be read as mathematics: 'hello'")):
            with pytest.raises(UserError, match=wanted):
                pool.check([answered("1"), answered(bad)])
        found = pool.score_now([make_group(answered("1"), "1", "$" + "{" * 5000, "$9^{9^{9^{9^{9}}}}$", "2", "$1.0$")])
    assert rewards_of(found.groups[0]) == [1, 0, 0, 0, 1]
    assert found.failures.num_failures + found.failures.num_unreadable <= 2


def test_reasoning_gym_scores_with_the_verifier_of_the_task(gym: RewardPool):
    prompt = generated("chain_sum")
    assert prompt.answer is not None
    assert rewards(gym, prompt, prompt.answer, "word") == [1.0, 0.0]
    text = f"I think 1, no, the answer is {prompt.answer}."
    assert rewards(gym, prompt, text, "word", extract="last-number") == [1.0, 0.0]
    assert 0 < rewards(gym, prompt, text)[0] < 1, "part of the score for a near miss"
    tagged = f"<answer>{prompt.answer}</answer> 5"
    assert rewards(gym, prompt, tagged, "5", extract="answer-tag") == [1.0, 0.0]


def test_a_task_without_listed_answer_is_scored_by_its_verifier(gym: RewardPool):
    prompt = generated("propositional_logic")
    assert prompt.answer is None
    example = prompt.metadata["metadata"]["example_answer"]
    assert rewards(gym, prompt, example, "nonsense")[0] == 1.0


def test_the_verifier_has_the_options_that_made_the_prompt(gym: RewardPool):
    """puzzle24's verifier refuses numbers outside the range that the puzzle was made with."""
    usual, small = generated("puzzle24"), generated("puzzle24", {"max_value": 6})
    assert rewards(gym, usual, "10 + 10 + 2 + 2") == [1.0]
    assert rewards(gym, small, "10 + 10 + 2 + 2") == [0.01]


def test_tasks_of_a_composite_are_scored_each_by_its_own_verifier(gym: RewardPool):
    options = {"datasets": [{"name": "gcd"}, {"name": "countdown"}]}
    for index in range(6):
        prompt = generated("composite", options, index)
        assert prompt.answer is not None
        assert rewards(gym, prompt, prompt.answer, "no")[0] == 1.0


def test_a_verifier_that_fails_on_a_response_scores_it_zero_and_is_counted(gym: RewardPool):
    prompt = generated("prime_factorization")
    assert prompt.answer is not None
    found = gym.score_now([make_group(prompt, "hello", prompt.answer, "world")])
    assert found.groups[0].reward_components["text"].tolist() == [0.0, 1.0, 0.0]
    assert found.failures.num_unreadable == 2 and found.failures.num_failures == 0
    assert "prime_factorization:0" in found.failures.examples[0] and "ValueError" in found.failures.examples[0]
    assert found.metrics()["reward_unreadable"] == 2
    assert found.failures.examples[0] in found.warnings()["unreadable responses"]


def test_entries_from_a_file_are_scored_too(gym: RewardPool):
    entry = generated("gcd").metadata
    prompt = Prompt("f.jsonl:1", np.array([1]), entry["question"], entry["answer"], {"metadata": entry["metadata"]})
    assert rewards(gym, prompt, entry["answer"], "x") == [1.0, 0.0]


def test_prompts_of_other_sources_are_refused_before_training(gym: RewardPool):
    with pytest.raises(UserError, match=r"'p7' has no 'generator'.* use another reward\.function"):
        gym.check([generated("gcd"), answered("7")])
    gym.check([generated("gcd"), generated("lcm")])


@pytest.mark.parametrize(("function", "extra"), [("reasoning-gym", "reasoning"), ("math-verify", "math")])
def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, extra: str
):
    (tmp_path / f"{function.replace('-', '_')}.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        open_pool(tmp_path, function=function) as pool,
        pytest.raises(UserError, match=rf'^reward\.function needs .* pip install -e "\.\[{extra}\]"'),
    ):
        pool.check([])


@pytest.mark.full
def test_every_generator_gives_its_listed_answer_a_finite_score(gym: RewardPool):
    factory = pytest.importorskip("reasoning_gym").factory
    scored = 0
    for name in factory.DATASETS:
        if name == "composite":
            continue
        config = DataConfig(source=f"reasoning-gym:{name}", size=1)
        prompt = generated(config.generator or "")
        values = rewards(gym, prompt, prompt.answer or "", "hello", "")
        assert len(values) == 3
        scored += values[0] == 1.0
    assert scored >= 95, "all but the tasks with open answers"
