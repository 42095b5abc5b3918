"""The page at the end of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from ratoon.view import RunSummary, final_page

SUMMARY = RunSummary(
    run_name="quick",
    run_dir=Path("runs/quick"),
    train_command="ratoon train recipes/quickstart.toml --seed=1",
    num_steps_done=30,
    num_steps=30,
    seconds_by_phase={"generate": 60.0, "reward": 0.5, "update": 80.0, "sft": 30.0},
    wall_s=175.0,
    num_logical_tokens=400_000,
    num_computed_rows=100_000,
    num_response_tokens=90_000,
    reward_before=0.41,
    reward_after=0.9,
    num_heldout_responses=200,
    checkpoint=Path("runs/quick/checkpoints/step-000030"),
)


def page(summary: RunSummary, *, ascii_only: bool = False, num_warnings: int = 0, num_warned: int = 0) -> list[str]:
    lines = final_page(summary, ascii_only=ascii_only, num_warnings=num_warnings, num_warned=num_warned)
    return [line.text for line in lines]


def line_with(lines: list[str], label: str) -> str:
    (found,) = [line for line in lines if label in line]
    return found


def test_the_page_says_what_the_run_did():
    lines = page(SUMMARY)
    assert "Run quick complete: 30 of 30 steps in 2m 55s" in lines
    assert "0.410 → 0.900  (+0.490; mean of 200 responses)" in line_with(lines, "held-out reward")
    assert "4.00  (400,000 logical tokens / 100,000 rows computed)" in line_with(lines, "dedup ratio")
    assert line_with(lines, "update tokens/s").endswith("5,000 logical, 1,250 computed")
    assert line_with(lines, "generate tokens/s").endswith("1,500")
    assert line_with(lines, "run folder").endswith(" runs/quick")
    assert line_with(lines, "use the model").endswith("ratoon export runs/quick quick-model")


def test_phases_stand_by_size_and_add_up_to_the_wall_clock():
    lines = page(SUMMARY)
    start = lines.index("Where the time went") + 1
    table = [line.split() for line in lines[start : start + 5]]
    assert [row[0] for row in table[:4]] == ["update", "generate", "sft", "reward"]
    assert line_with(lines, "everything else").split()[2:4] == ["4.5s", "2.6%"]
    percents = [float(word.rstrip("%")) for row in table for word in row if word.endswith("%")]
    assert sum(percents) == pytest.approx(100.0, abs=0.3)


def test_phases_that_overlap_do_not_pass_100_percent():
    lines = page(replace(SUMMARY, wall_s=100.0))
    assert not any("everything else" in line for line in lines)
    assert "46.9%" in line_with(lines, "  update    ")  # 80 of 170.5 measured seconds


def test_a_stopped_run_says_how_to_go_on():
    lines = page(replace(SUMMARY, num_steps_done=12, reward_after=None))
    assert "Run quick stopped: 12 of 30 steps in 2m 55s" in lines
    assert line_with(lines, "resume").endswith("ratoon train recipes/quickstart.toml --seed=1")
    assert "0.410 before training" in line_with(lines, "held-out reward")
    assert not any("train longer" in line for line in lines)


def test_a_complete_run_says_how_to_train_longer():
    assert line_with(page(SUMMARY), "train longer").endswith("quickstart.toml --seed=1 --trainer.num_steps 60")


def test_a_run_of_nothing_has_a_page():
    empty = RunSummary(
        run_name="r",
        run_dir=Path("runs/r"),
        train_command="ratoon train r.toml",
        num_steps_done=0,
        num_steps=5,
        seconds_by_phase={},
        wall_s=0.0,
        num_logical_tokens=0,
        num_computed_rows=0,
        num_response_tokens=0,
    )
    lines = page(empty)
    assert line_with(lines, "held-out reward").endswith("not evaluated")
    assert not any("export" in line or "tokens/s" in line or "dedup" in line for line in lines)


def test_a_worse_reward_is_not_shown_as_a_success():
    (line,) = [line for line in final_page(replace(SUMMARY, reward_after=0.3)) if "held-out" in line.text]
    assert "(-0.110;" in line.text and "green" not in line.style


def test_notes_and_warnings_are_on_the_page():
    lines = page(replace(SUMMARY, notes=("loss was 0 in 3 steps: all rewards equal",)), num_warnings=2)
    assert "note: loss was 0 in 3 steps: all rewards equal" in lines
    assert line_with(lines, "2 warnings above").endswith("runs/quick/run.log")


def test_warnings_that_were_given_again_are_counted():
    assert "2 warnings above (given 1,014 times in all), also" in "\n".join(
        page(SUMMARY, num_warnings=2, num_warned=1014)
    )
    assert "2 warnings above, also" in "\n".join(page(SUMMARY, num_warnings=2, num_warned=2))


def test_failed_rewards_have_a_total():
    failed = replace(SUMMARY, num_failures_by_cause={"timeout": 1_035, "raised": 2}, num_responses_dropped=3)
    assert line_with(page(failed), "reward failures").endswith(" 1,037 (timeout 1,035, raised 2); 3 dropped")
    assert not any("failures" in line for line in page(SUMMARY))


def test_the_latest_evaluation_stands_with_its_step_unless_it_was_the_last():
    stopped = replace(SUMMARY, num_steps_done=25, reward_after_step=20)
    assert "0.410 → 0.900 after step 20  (+0.490; mean" in line_with(page(stopped), "held-out reward")
    alone = replace(stopped, reward_before=None)
    assert "0.900 after step 20  (mean" in line_with(page(alone), "held-out reward")
    assert "0.410 → 0.900  (+0.490; mean" in line_with(page(replace(SUMMARY, reward_after_step=30)), "held-out")


def test_the_ascii_page_is_ascii():
    assert "\n".join(page(SUMMARY, ascii_only=True)).isascii()
    assert "0.410 -> 0.900" in line_with(page(SUMMARY, ascii_only=True), "held-out reward")


def test_the_command_to_train_longer_names_the_length_once():
    command = "ratoon train r.toml --trainer.num_steps 30 --run.seed=1"
    (line,) = [text for text in page(replace(SUMMARY, train_command=command)) if "train longer" in text]
    assert line.endswith(f"ratoon train r.toml --run.seed=1 --trainer.num_steps {2 * SUMMARY.num_steps}")


def test_a_run_of_no_steps_is_told_a_length_to_train():
    (line,) = [text for text in page(replace(SUMMARY, num_steps=0, num_steps_done=0)) if "train longer" in text]
    assert line.endswith("--trainer.num_steps 100")
