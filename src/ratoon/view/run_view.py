"""Progress of a run: a live block on a terminal, plain lines anywhere else."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ratoon.view.page import final_page
from ratoon.view.summary import RunSummary, StepReport
from ratoon.view.text import bar, duration, key_values, sparkline

_RECENT_STEPS = 10
"""Steps whose median duration the remaining time is reckoned from."""

_SPARKLINE_WIDTH = 30
_BAR_WIDTH = 24
_REFRESH_PER_S = 2.0


class RunView:
    """Shows what a run does. Use it as a context manager, on the rank that writes the run's files.

    On a terminal a block of three lines is redrawn in place. Elsewhere, and where TERM is dumb, every step is one line
    of `key=value` pairs. NO_COLOR is respected. Whatever is shown also goes to `log`, one plain line each; when nobody
    reads the output any more, to `log` only.
    """

    def __init__(
        self,
        run_name: str,
        *,
        log: Callable[[str], None],
        console: Console | None = None,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """live: redraw in place; None decides by whether standard output is a terminal that can."""
        self.run_name = run_name
        self._log = log
        self._console = console or _Console(highlight=False)
        # FORCE_COLOR makes rich call a pipe a terminal; a block redrawn into a file is of no use to anyone.
        self._is_live = self._console.is_interactive and self._console.file.isatty() if live is None else live
        self._now = now
        self._live: Live | None = None
        self._phase = "start"
        self._phase_began = now()
        self._report: StepReport | None = None
        self._rewards: list[float] = []
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._warned: set[str] = set()
        self._num_warned = 0

    def __enter__(self) -> "RunView":
        if self._is_live:
            # A call, not a value: elapsed seconds move on between steps.
            self._live = Live(
                get_renderable=self._block, console=self._console, refresh_per_second=_REFRESH_PER_S, transient=True
            )
            with self._while_read():
                self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def phase(self, name: str) -> None:
        """Says what the run is doing now: generate, reward, update, evaluate, ... Shown on a terminal only."""
        self._phase, self._phase_began = name, self._now()

    def step(self, report: StepReport) -> None:
        """Shows one finished step."""
        if self._report is not None and self._report.stage != report.stage:
            self._rewards.clear()
            self._recent_s.clear()
        self._report = report
        self._recent_s.append(report.seconds)
        if report.reward_mean is not None:
            self._rewards.append(report.reward_mean)
        line = f"{report.stage} step {report.step}/{report.num_steps} " + key_values(
            reward_mean=report.reward_mean,
            loss=report.loss,
            logical_tokens_per_s=report.logical_tokens_per_s,
            computed_tokens_per_s=report.computed_tokens_per_s,
            dedup_ratio=report.dedup_ratio,
            step_s=report.seconds,
            eta_s=self._eta_s(),
        )
        self._log(line)
        if self._live is None:
            self._print(line)
        else:
            with self._while_read():
                self._live.refresh()

    def say(self, text: str, style: str = "") -> None:
        """Shows one lasting line."""
        self._log(text)
        self._print(text, style)

    def warn(self, text: str, *, kind: str | None = None) -> None:
        """Shows a warning the first time it is given; one with a `kind`, the first time one of that kind is.

        metrics.jsonl counts how often a kind occurs; its figures would only repeat here.
        """
        self._num_warned += 1
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            self.say(f"warning: {text}", "yellow")

    def finish(self, summary: RunSummary) -> None:
        """Takes the live block away and shows the final page."""
        self._stop()
        page = final_page(
            summary, ascii_only=self._ascii_only, num_warnings=len(self._warned), num_warned=self._num_warned
        )
        for line in page:
            self.say(line.text, line.style)

    def _stop(self) -> None:
        if self._live is not None:
            with self._while_read():
                self._live.stop()
            self._live = None

    @property
    def _ascii_only(self) -> bool:
        return self._console.options.ascii_only

    def _print(self, text: str, style: str = "") -> None:
        encoding = self._console.encoding
        shown = text.encode(encoding, "replace").decode(encoding)
        # Text, not markup: rewards and prompts may hold brackets. Soft wrap: lines stay whole for grep and copying.
        with self._while_read():
            self._console.print(Text(shown, style), soft_wrap=True)

    @contextmanager
    def _while_read(self) -> Iterator[None]:
        """The reader of the output may go (`| head`), or the output be closed: no reason to stop training."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._console.file.closed:
                raise
            self._console.quiet = True
            # What is left in its buffer must not fail once more at the end of the program.
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._console.file.fileno())
            self._log(f"warning: the output cannot be written any more ({error}); going on in this log only")

    def _eta_s(self) -> float | None:
        if self._report is None or not self._recent_s:
            return None
        return median(self._recent_s) * max(self._report.num_steps - self._report.step, 0)

    def _block(self) -> Group:
        phase = f"{self._phase} {duration(self._now() - self._phase_began)}"
        report = self._report
        if report is None:
            return Group(_line(f"{self.run_name}  {phase}", "bold"))
        eta_s = self._eta_s()
        progress = bar(report.step / max(report.num_steps, 1), width=_BAR_WIDTH, ascii_only=self._ascii_only)
        remaining = f"  about {duration(eta_s)} left" if eta_s is not None else ""
        lines = [
            _line(f"{self.run_name}  {report.stage}  {phase}", "bold"),
            _line(f"step {report.step}/{report.num_steps} {progress}{remaining}"),
            _line("  ".join(self._measured(report))),
        ]
        return Group(*lines)

    def _measured(self, report: StepReport) -> list[str]:
        parts: list[str] = []
        if report.reward_mean is not None:
            spark = sparkline(self._rewards, width=_SPARKLINE_WIDTH, ascii_only=self._ascii_only)
            parts.append(f"reward {report.reward_mean:.3f} {spark}")
        if report.loss is not None:
            parts.append(f"loss {report.loss:.4g}")
        if report.logical_tokens_per_s is not None:
            parts.append(f"{report.logical_tokens_per_s:,.0f} logical/s")
        if report.computed_tokens_per_s is not None:
            parts.append(f"{report.computed_tokens_per_s:,.0f} computed/s")
        if report.dedup_ratio is not None:
            parts.append(f"dedup {report.dedup_ratio:.2f}")
        return parts


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called in the handler of the error: rich would end the program."""
        raise


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
