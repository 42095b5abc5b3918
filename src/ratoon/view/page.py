"""The page at the end of a run."""

import re
from dataclasses import dataclass

from ratoon.view.summary import RunSummary
from ratoon.view.text import bar, duration

_LABEL_WIDTH = 22
_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class PageLine:
    """One line, and how it stands out where colours are shown."""

    text: str
    style: str = ""
    """A rich style."""


def final_page(
    summary: RunSummary, *, ascii_only: bool = False, num_warnings: int = 0, num_warned: int = 0
) -> list[PageLine]:
    """What the run did, where its time went, where its files are, and what to do next.

    Lines are never wrapped: paths and commands can be copied. num_warnings: how many were shown above.
    num_warned: how often they were given, of which each was shown once.
    """
    state = "complete" if summary.is_complete else "stopped"
    steps = f"{summary.num_steps_done} of {summary.num_steps} steps in {duration(summary.wall_s)}"
    lines = [PageLine(""), PageLine(f"Run {summary.run_name} {state}: {steps}", "bold")]
    lines.extend(_result_lines(summary, "->" if ascii_only else "→"))
    lines.extend(_time_lines(summary, ascii_only))
    lines.extend(PageLine(f"note: {note}", "yellow") for note in summary.notes)
    if num_warnings:
        often = f" (given {num_warned:,} times in all)" if num_warned > num_warnings else ""
        log = summary.run_dir / "run.log"
        lines.append(PageLine(f"{_plural(num_warnings, 'warning')} above{often}, also in {log}", "yellow"))
    lines.extend(_next_lines(summary))
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _labelled(label: str, text: str, style: str = "") -> PageLine:
    return PageLine(f"  {label:<{_LABEL_WIDTH}} {text}", style)


def _result_lines(summary: RunSummary, arrow: str) -> list[PageLine]:
    lines: list[PageLine] = []
    before, after = summary.reward_before, summary.reward_after
    is_last = summary.reward_after_step in (None, summary.num_steps_done)
    at_step = "" if is_last else f" after step {summary.reward_after_step}"
    over = f"mean of {_plural(summary.num_heldout_responses, 'response')}"
    if before is not None and after is not None:
        style = "bold green" if after > before else "bold yellow"
        lines.append(
            _labelled(
                "held-out reward", f"{before:.3f} {arrow} {after:.3f}{at_step}  ({after - before:+.3f}; {over})", style
            )
        )
    elif before is not None:
        lines.append(_labelled("held-out reward", f"{before:.3f} before training  ({over})"))
    elif after is not None:
        lines.append(_labelled("held-out reward", f"{after:.3f}{at_step or ' after training'}  ({over})"))
    else:
        lines.append(_labelled("held-out reward", "not evaluated"))
    if failures := summary.num_failures_by_cause:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in failures.items())
        text = f"{sum(failures.values()):,} ({causes}); {summary.num_responses_dropped:,} dropped"
        lines.append(_labelled("reward failures", text, "yellow"))
    if summary.dedup_ratio is not None:
        counts = f"{summary.num_logical_tokens:,} logical tokens / {summary.num_computed_rows:,} rows computed"
        lines.append(_labelled("dedup ratio", f"{summary.dedup_ratio:.2f}  ({counts})"))
    if summary.logical_tokens_per_s is not None and summary.computed_tokens_per_s is not None:
        rates = f"{summary.logical_tokens_per_s:,.0f} logical, {summary.computed_tokens_per_s:,.0f} computed"
        lines.append(_labelled("update tokens/s", rates))
    if summary.generated_tokens_per_s is not None:
        lines.append(_labelled("generate tokens/s", f"{summary.generated_tokens_per_s:,.0f}"))
    if summary.memory_peak_gib is not None:
        predicted = summary.memory_predicted_gib
        beside = "" if predicted is None else f"  ({predicted:.2f} GiB predicted)"
        lines.append(_labelled("memory, largest step", f"{summary.memory_peak_gib:.2f} GiB{beside}"))
    return lines


def _time_lines(summary: RunSummary, ascii_only: bool) -> list[PageLine]:
    """Phases by their seconds, the largest first, and what no phase accounts for."""
    phases = sorted(summary.seconds_by_phase.items(), key=lambda item: -item[1])
    measured_s = sum(summary.seconds_by_phase.values())
    # Phases of concurrent tasks overlap and can sum to more than the wall clock.
    total_s = max(summary.wall_s, measured_s)
    if total_s <= 0:
        return []
    if total_s - measured_s >= 0.05:
        phases.append(("(everything else)", total_s - measured_s))
    lines = [PageLine("Where the time went", "bold")]
    for phase, seconds in phases:
        fraction = seconds / total_s
        bars = bar(fraction, width=_BAR_WIDTH, ascii_only=ascii_only)
        lines.append(_labelled(phase, f"{duration(seconds):>9} {fraction:>6.1%}  {bars}"))
    return lines


def _next_lines(summary: RunSummary) -> list[PageLine]:
    lines = [PageLine("Files", "bold"), _labelled("run folder", str(summary.run_dir))]
    if summary.checkpoint is not None:
        lines.append(_labelled("checkpoint", str(summary.checkpoint)))
    if summary.best_checkpoint is not None:
        lines.append(_labelled("best checkpoint", str(summary.best_checkpoint)))
    lines.append(PageLine("What next", "bold"))
    if summary.how_to_go_on is not None:
        lines.append(PageLine(f"  {summary.how_to_go_on}"))
    elif not summary.is_complete:
        lines.append(_labelled("resume", summary.train_command))
    if summary.checkpoint is not None:
        lines.append(_labelled("use the model", f"ratoon export {summary.run_dir} {summary.run_name}-model"))
    if summary.is_complete:
        command = re.sub(r" --trainer\.num_steps[= ]\S+", "", summary.train_command)
        longer = f"{command} --trainer.num_steps {2 * summary.num_steps or 100}"
        lines.append(_labelled("train longer", longer))
    if summary.num_steps_done:
        lines.append(_labelled("read what it wrote", str(summary.run_dir / "rollouts")))
    return lines
