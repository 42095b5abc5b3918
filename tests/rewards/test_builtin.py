import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratoon.data import DataConfig
from ratoon.data.generators import generate_rows
from ratoon.rewards import RewardConfig, build_reward_fn, check_prompts, score
from ratoon.types import Prompt, Response, RolloutGroup, UserError


def make_group(prompt: Prompt, *texts: str) -> RolloutGroup:
    return RolloutGroup(prompt, tuple(Response(np.array([1]), text=text) for text in texts))


def rewards(prompt: Prompt, *texts: str, **settings: Any) -> list[float]:
    reward_fn = build_reward_fn(RewardConfig.model_validate(settings), base_dir=Path())
    scored = score(make_group(prompt, *texts), reward_fn).rewards_N
    assert scored is not None
    return scored.tolist()


def answered(answer: str | None) -> Prompt:
    return Prompt("p7", np.array([1]), "question", answer)


def generated(name: str, options: dict[str, Any] | None = None, index: int = 0) -> Prompt:
    pytest.importorskip("reasoning_gym")
    row = generate_rows(name, options or {}, size=index + 1, seed=0)[index]
    return Prompt(row.id, np.array([1]), row.prompt, row.answer, row.metadata)


@pytest.mark.parametrize(
    ("extract", "answer", "texts", "wanted"),
    [
        ("text", "Paris", ["Paris", " Paris\n", "paris", "Paris.", ""], [1, 1, 0, 0, 0]),
        ("text", "", ["", "x"], [1, 0]),
        ("last-number", "1,234.50", ["it is 1234.5", "1234.50!", "1235", "none"], [1, 1, 0, 0]),
        ("last-number", "#### 72", ["72", "72.0", "144/2", "7.2e1", "27"], [1, 1, 1, 1, 0]),
        ("last-number", "0", ["0", "-0", "0/5", "", "3/0"], [1, 1, 1, 0, 0]),
        ("last-number", "9" * 100, ["9" * 100, "9" * 99], [1, 0]),
        ("answer-tag", "7", ["<answer>7</answer>", "<answer> 7 </answer>", "7", "<answer>8</answer>"], [1, 1, 0, 0]),
    ],
)
def test_exact_match(extract: str, answer: str, texts: list[str], wanted: list[float]):
    assert rewards(answered(answer), *texts, function="exact-match", extract=extract) == wanted


def test_exact_match_needs_answers_that_can_be_matched():
    text = RewardConfig(function="exact-match")
    number = RewardConfig(function="exact-match", extract="last-number")
    with pytest.raises(UserError, match=r"needs answers, but prompt 'p7' has none; set data\.answer_column"):
        check_prompts(text, [answered("a"), answered(None)])
    with pytest.raises(UserError, match="answer of prompt 'p7' holds no number: 'seven'"):
        check_prompts(number, [answered("7"), answered("seven")])
    check_prompts(number, [answered("7")])
    with pytest.raises(UserError, match="needs answers"):
        score(make_group(answered(None), "x"), build_reward_fn(text, base_dir=Path()))


def test_reasoning_gym_scores_with_the_verifier_of_the_task():
    prompt = generated("chain_sum")
    assert prompt.answer is not None
    assert rewards(prompt, prompt.answer, "word", function="reasoning-gym") == [1.0, 0.0]
    text = f"I think 1, no, the answer is {prompt.answer}."
    assert rewards(prompt, text, "word", function="reasoning-gym", extract="last-number") == [1.0, 0.0]
    assert 0 < rewards(prompt, text, function="reasoning-gym")[0] < 1, "part of the score for a near miss"
    tagged = f"<answer>{prompt.answer}</answer> 5"
    assert rewards(prompt, tagged, "5", function="reasoning-gym", extract="answer-tag") == [1.0, 0.0]


def test_a_task_without_listed_answer_is_scored_by_its_verifier():
    prompt = generated("propositional_logic")
    assert prompt.answer is None
    example = prompt.metadata["metadata"]["example_answer"]
    assert rewards(prompt, example, "nonsense", function="reasoning-gym")[0] == 1.0


def test_the_verifier_has_the_options_that_made_the_prompt():
    """puzzle24's verifier refuses numbers outside the range that the puzzle was made with."""
    usual, small = generated("puzzle24"), generated("puzzle24", {"max_value": 6})
    assert rewards(usual, "10 + 10 + 2 + 2", function="reasoning-gym") == [1.0]
    assert rewards(small, "10 + 10 + 2 + 2", function="reasoning-gym") == [0.01]


def test_tasks_of_a_composite_are_scored_each_by_its_own_verifier():
    options = {"datasets": [{"name": "gcd"}, {"name": "countdown"}]}
    for index in range(6):
        prompt = generated("composite", options, index)
        assert prompt.answer is not None
        assert rewards(prompt, prompt.answer, "no", function="reasoning-gym")[0] == 1.0


def test_a_verifier_that_fails_on_a_response_scores_it_zero_and_says_so(caplog: pytest.LogCaptureFixture):
    prompt = generated("prime_factorization")
    assert prompt.answer is not None
    assert rewards(prompt, "hello", prompt.answer, "world", function="reasoning-gym") == [0.0, 1.0, 0.0]
    (record,) = caplog.records
    assert "prime_factorization:0" in record.getMessage() and "hello" in record.getMessage()


def test_entries_from_a_file_are_scored_too():
    entry = generated("gcd").metadata
    prompt = Prompt("f.jsonl:1", np.array([1]), entry["question"], entry["answer"], {"metadata": entry["metadata"]})
    assert rewards(prompt, entry["answer"], "x", function="reasoning-gym") == [1.0, 0.0]


def test_prompts_of_other_sources_are_refused_before_training():
    config = RewardConfig(function="reasoning-gym")
    with pytest.raises(UserError, match=r"'p7' has no 'generator'.* use another reward\.function"):
        check_prompts(config, [generated("gcd"), answered("7")])
    check_prompts(config, [generated("gcd"), generated("lcm")])


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reward\.function needs .* pip install 'ratoon\[reasoning\]'"):
        build_reward_fn(RewardConfig(function="reasoning-gym"), base_dir=Path())


@pytest.mark.full
def test_every_generator_gives_its_listed_answer_a_finite_score():
    factory = pytest.importorskip("reasoning_gym").factory
    scored = 0
    for name in factory.DATASETS:
        if name == "composite":
            continue
        config = DataConfig(source=f"reasoning-gym:{name}", size=1)
        prompt = generated(config.generator or "")
        values = rewards(prompt, prompt.answer or "", "hello", "", function="reasoning-gym")
        assert len(values) == 3
        scored += values[0] == 1.0
    assert scored >= 95, "all but the tasks with open answers"
