"""What a run of cases found, and how it goes on where a candidate cannot."""

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ratoon.bench.rows import BenchRow


class CannotRunError(Exception):
    """The candidate cannot do this case here; the message says why."""


class WrongResultError(Exception):
    """A candidate computes something else; the message says what, and no speed may be reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """A candidate without figures."""

    case_name: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that a run found."""

    rows: list[BenchRow] = field(default_factory=list)

    skipped: list[Unmeasured] = field(default_factory=list)
    """Cannot run the case, here or at all."""

    failed: list[Unmeasured] = field(default_factory=list)
    """Computed something else, or one of ours that broke: the run as a whole has failed."""

    @contextmanager
    def noting(
        self,
        case_name: str,
        label: str,
        say: Callable[[str], None],
        *,
        is_ours: bool,
        refusals: tuple[type[Exception], ...] = (),
        width: int,
    ) -> Iterator[None]:
        """Says and notes what ends its block, and lets the run go on.

        refusals: what one of ours raises where it cannot do the case; anything else of ours is a fault.
        width: of the label's column.
        """
        is_failure = False
        try:
            yield
            return
        except CannotRunError as error:
            reason = str(error)
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {_first_line(error)}"
        except WrongResultError as error:
            reason, is_failure = f"WRONG, no speed is reported: {error}", True
        except Exception as error:  # kernels of others raise anything; what is measured already must not be lost
            reason = f"{type(error).__name__}: {_first_line(error)}"
            is_failure = is_ours and not isinstance(error, refusals)
            if is_failure:
                say(traceback.format_exc())
        free_memory()  # raises where the error has broken the device for all that would follow
        say(f"  {label:<{width}} {'failed' if is_failure else 'not run'}: {reason}")
        unmeasured = Unmeasured(case_name=case_name, name=label, reason=reason)
        (self.failed if is_failure else self.skipped).append(unmeasured)


def unmeasured_lines(unmeasured: Sequence[Unmeasured]) -> list[str]:
    """One line for each name and reason, with the cases that it is the reason in."""
    cases: dict[tuple[str, str], list[str]] = {}
    for one in unmeasured:
        cases.setdefault((one.name, one.reason), []).append(one.case_name)
    return [f"{name} ({', '.join(of_name)}): {reason}" for (name, reason), of_name in cases.items()]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
