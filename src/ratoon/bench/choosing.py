"""The cases and candidates that a command names."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from ratoon.types.errors import UserError


class SizedCase(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def needs_gpu(self) -> bool: ...


Case = TypeVar("Case", bound=SizedCase)


def choose_cases(names: Sequence[str], cases: Mapping[str, Case], what: str, *, has_gpu: bool) -> list[Case]:
    """The cases by these names, in the order given.

    Raises UserError for a name that does not exist, and for a case that is too large for a CPU.
    """
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise UserError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(cases)}")
    chosen = [cases[name] for name in names]
    too_large = [case.name for case in chosen if case.needs_gpu and not has_gpu]
    if too_large:
        small = ", ".join(case.name for case in cases.values() if not case.needs_gpu)
        raise UserError(
            f"too large for a CPU, and torch finds no CUDA device here: {', '.join(too_large)}; a CPU can run {small}"
        )
    return chosen


def choose_names(asked: Sequence[str] | None, known: Sequence[str], default: Sequence[str], what: str) -> list[str]:
    """The names asked for, in the order given; `default` for None, none at all for "none".

    Raises UserError, listing what there is, for a name that does not exist.
    """
    if asked is None:
        return list(default)
    if list(asked) == ["none"]:
        return []
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UserError(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}, and none")
    return list(asked)
