"""What a person sees while a run goes on, on a terminal and without one."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ratoon.view import RunLog, RunSummary, RunView, StepReport

CONTROL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def report(step: int, *, stage: str = "grpo", seconds: float = 2.0, reward_mean: float | None = 0.5) -> StepReport:
    return StepReport(
        stage=stage,
        step=step,
        num_steps=30,
        seconds=seconds,
        reward_mean=reward_mean,
        logical_tokens_per_s=12_345.6,
        computed_tokens_per_s=3_086.4,
        dedup_ratio=4.0,
    )


def summary() -> RunSummary:
    return RunSummary(
        run_name="quick",
        run_dir=Path("runs/quick"),
        train_command="ratoon train recipes/quickstart.toml",
        num_steps_done=30,
        num_steps=30,
        seconds_by_phase={"update": 2.0},
        wall_s=3.0,
        num_logical_tokens=100,
        num_computed_rows=50,
        num_response_tokens=10,
    )


class Screen:
    """A view, what it printed and what it logged."""

    def __init__(self, *, live: bool, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        self.file = io.TextIOWrapper(self.bytes, encoding=encoding, write_through=True)
        self.logged: list[str] = []
        console = Console(file=self.file, force_terminal=live, width=100, highlight=False, color_system=None)
        self.seconds = 0.0
        self.view = RunView("quick", log=self.logged.append, console=console, live=live, now=lambda: self.seconds)

    @property
    def printed(self) -> str:
        return self.bytes.getvalue().decode(self.file.encoding)

    @property
    def lines(self) -> list[str]:
        return CONTROL_CODE.sub("", self.printed).replace("\r", "\n").splitlines()


def test_without_a_terminal_each_step_is_one_greppable_line():
    screen = Screen(live=False)
    with screen.view as view:
        view.phase("generate")
        for step in (1, 2):
            view.step(report(step))
    assert (
        screen.lines
        == screen.logged
        == [
            f"grpo step {step}/30 reward_mean=0.5 logical_tokens_per_s=12346 computed_tokens_per_s=3086 "
            f"dedup_ratio=4 step_s=2 eta_s={2 * (30 - step)}"
            for step in (1, 2)
        ]
    )
    assert "\x1b" not in screen.printed


def test_what_was_not_measured_is_not_shown():
    screen = Screen(live=False)
    with screen.view as view:
        view.step(StepReport(stage="sft", step=1, num_steps=2, seconds=1.0, loss=2.25))
    assert screen.lines == ["sft step 1/2 loss=2.25 step_s=1 eta_s=1"]


def test_a_terminal_shows_phase_progress_reward_speed_and_time_left():
    screen = Screen(live=True)
    with screen.view as view:
        view.phase("generate")
        for step, reward_mean in enumerate([0.25, 0.5, 0.75], start=1):
            view.step(report(step, reward_mean=reward_mean))
        shown = "\n".join(screen.lines)
    for part in ("quick", "grpo", "generate", "step 3/30", "about 54.0s left", "reward 0.750 ▁▅█", "12,346 logical/s"):
        assert part in shown
    assert "dedup 4.00" in shown and "3,086 computed/s" in shown
    assert len(screen.logged) == 3 and all("\x1b" not in line for line in screen.logged)
    assert max(len(line) for line in screen.lines) <= 100


def test_the_phase_has_its_own_seconds():
    screen = Screen(live=True)
    with screen.view as view:
        view.phase("evaluate")
        screen.seconds = 75.0
        view.step(report(1))
        assert "evaluate 1m 15s" in "\n".join(screen.lines)


def test_time_left_follows_recent_steps_and_not_one_slow_one():
    screen = Screen(live=False)
    with screen.view as view:
        view.step(report(1, seconds=1_000.0))
        for step in range(2, 6):
            view.step(report(step, seconds=3.0))
    assert screen.lines[-1].endswith("eta_s=75")


def test_a_new_stage_starts_its_own_history():
    screen = Screen(live=False)
    with screen.view as view:
        view.step(report(29, stage="sft", seconds=100.0, reward_mean=None))
        view.step(report(1, seconds=2.0))
    assert "reward_mean" not in screen.lines[0] and screen.lines[1].endswith("eta_s=58")


@pytest.mark.parametrize("live", [True, False])
def test_a_warning_is_shown_once_and_as_it_is(live: bool):
    screen = Screen(live=live)
    with screen.view as view:
        for _ in range(3):
            view.warn("all rewards of [bold]step 3[/bold] are equal")
        view.warn("another")
    shown = [line for line in screen.lines if "warning" in line]
    assert shown == ["warning: all rewards of [bold]step 3[/bold] are equal", "warning: another"] == screen.logged


@pytest.mark.parametrize("live", [True, False])
def test_everything_lasting_is_logged_too(live: bool):
    screen = Screen(live=live)
    with screen.view as view:
        view.say("held-out reward before: 0.41")
        view.warn("odd")
        view.finish(summary())
    assert "held-out reward before: 0.41" in screen.logged
    assert any("1 warning above" in line for line in screen.logged)
    lasting = "\n".join(line.rstrip() for line in screen.lines)
    for line in screen.logged:
        assert line.rstrip() in lasting


def test_long_lines_are_not_wrapped():
    screen = Screen(live=False)
    path = "/scratch/" + "deep/" * 40
    with screen.view as view:
        view.say(f"checkpoint {path}")
    assert screen.lines == [f"checkpoint {path}"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("live", [True, False])
def test_an_old_terminal_gets_what_it_can_show(live: bool, encoding: str):
    screen = Screen(live=live, encoding=encoding)
    with screen.view as view:
        for step in range(1, 5):
            view.step(report(step, reward_mean=step / 10))
        view.say("ε → \ud83d")
        view.finish(summary())
    assert "→" not in screen.printed and "█" not in screen.printed
    assert screen.logged[4] == "ε → \ud83d", "the log keeps it"


def test_the_terminal_is_given_back_when_the_run_fails():
    screen = Screen(live=True)
    with contextlib.suppress(KeyError), screen.view as view:
        view.step(report(1))
        raise KeyError("weights")
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert screen.printed.rindex(shown) > screen.printed.rindex(hidden)


SCRIPT = """
from ratoon.view import RunView, StepReport
with RunView("quick", log=lambda text: None) as view:
    view.phase("generate")
    view.step(StepReport(stage="grpo", step=1, num_steps=2, seconds=1.0, reward_mean=0.5))
    view.warn("odd")
"""


def run_script(*, terminal: bool, **variables: str) -> str:
    """Output of SCRIPT in a process of its own, on a real pseudo-terminal or a pipe."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "TERM": "xterm-256color", **variables}
    command = [sys.executable, "-c", SCRIPT]
    if not terminal:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(ours, 65_536)
        except OSError:  # how Linux ends a pseudo-terminal
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return b"".join(chunks).decode()


def test_a_real_terminal_gets_the_live_block():
    output = run_script(terminal=True)
    assert "\x1b[?25l" in output and "\x1b[33m" in output and "generate" in output


def test_no_color_is_respected():
    assert "\x1b[33m" not in run_script(terminal=True, NO_COLOR="1")


@pytest.mark.parametrize(
    ("terminal", "variables"), [(True, {"TERM": "dumb"}), (False, {}), (False, {"FORCE_COLOR": "1"})]
)
def test_pipes_and_dumb_terminals_get_plain_lines(terminal: bool, variables: dict[str, str]):
    output = CONTROL_CODE.sub("", run_script(terminal=terminal, **variables)).replace("\r", "")
    assert output == "grpo step 1/2 reward_mean=0.5 step_s=1 eta_s=1\nwarning: odd\n"


def test_the_log_file_stamps_every_line_and_appends(tmp_path: Path):
    for text in ("first\nsecond", "ε \ud83d"):
        log = RunLog(tmp_path / "runs" / "run.log")
        log(text)
        assert (tmp_path / "runs" / "run.log").read_text().endswith("\n"), "written at once"
        log.close()
    lines = (tmp_path / "runs" / "run.log").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["first", "second", "ε \\ud83d"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]", line) for line in lines)


def test_a_kind_of_warning_is_shown_once_whatever_its_figures():
    lines: list[str] = []
    view = RunView("run", log=lines.append, console=Console(file=io.StringIO()), live=False)
    view.warn("7 of 8 responses were cut", kind="cut responses")
    view.warn("8 of 8 responses were cut", kind="cut responses")
    view.warn("something else")
    assert lines == ["warning: 7 of 8 responses were cut", "warning: something else"]


@pytest.mark.parametrize("live", [True, False])
def test_an_output_that_is_closed_midway_is_said_in_the_log(live: bool):
    screen = Screen(live=live)
    with screen.view as view:
        view.say("before")
        screen.file.close()
        view.say("after")
        view.step(report(1))
        view.finish(summary())
    assert screen.logged[:2] == ["before", "after"]
    assert sum("cannot be written any more" in line for line in screen.logged) == 1
    assert any(line.startswith("Run quick ") for line in screen.logged)
