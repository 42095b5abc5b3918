"""The table that `auto` reads: which kernels serve which calls on which architecture. Its data is choices.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from ratoon.attention.request import AttentionRequest, Feature

TABLE_FILE = "choices.toml"

ARCHITECTURES = ("cpu", "sm80", "sm89", "sm90", "sm100", "sm120", "amd", "other", "any")

_FEATURE_OF_KEY: dict[str, Feature] = {
    "window": "sliding window",
    "softcap": "softcap",
    "sinks": "sinks",
    "deterministic": "deterministic backward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """Kernels, and the calls they are meant for. A condition that is None always holds."""

    architecture: str

    number: int
    """Of the row in its architecture's table, from 1."""

    forward: str
    backward: str

    measured: str
    """The benchmark row that decided, or why there is none."""

    head_dims: tuple[int, int] | None
    """Smallest and largest, of the larger of the two head dims."""

    wanted: frozenset[Feature]
    """Calls must ask for these."""

    unwanted: frozenset[Feature]
    """Calls must not ask for these."""

    rows_below: int | None

    @property
    def name(self) -> str:
        return f"row {self.number} for {self.architecture}"

    def holds_for(self, request: AttentionRequest) -> bool:
        if self.head_dims is not None and not self.head_dims[0] <= request.larger_head_dim <= self.head_dims[1]:
            return False
        if self.rows_below is not None and (request.num_rows is None or request.num_rows >= self.rows_below):
            return False
        return self.wanted <= request.features and not self.unwanted & request.features


ChoiceTable = dict[str, tuple[ChoiceRow, ...]]
"""By architecture."""


def rows_for(table: ChoiceTable, architecture: str) -> tuple[ChoiceRow, ...]:
    """The architecture's own rows, then those for any."""
    return table.get(architecture, ()) + table.get("any", ())


def architecture_of(device_type: str) -> str:
    """The architecture whose rows a device of this machine reads."""
    if device_type != "cuda":
        return device_type if device_type in ARCHITECTURES else "other"
    if not torch.cuda.is_available():
        return "other"
    if torch.version.hip is not None:
        return "amd"
    major, minor = torch.cuda.get_device_capability()
    match major:
        case 8:
            return "sm80" if minor == 0 else "sm89"
        case 9:
            return "sm90"
        case 10 | 11:
            return "sm100"
        case 12:
            return "sm120"
        case _:
            return "other"


@cache
def shipped_rows() -> ChoiceTable:
    return parse_choices(files("ratoon.attention").joinpath(TABLE_FILE).read_text(encoding="utf-8"))


def parse_choices(text: str) -> ChoiceTable:
    """Raises ValueError naming the row and the key for whatever is not as choices.toml says of itself."""
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{TABLE_FILE} is no TOML: {error}") from error
    unknown = sorted(found.keys() - set(ARCHITECTURES))
    if unknown:
        raise ValueError(f"{TABLE_FILE} has tables for {', '.join(unknown)}, allowed are {', '.join(ARCHITECTURES)}")
    for architecture, rows in found.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                f"{TABLE_FILE}: {architecture} must be a list of rows, each under [[{architecture}]] in two brackets, "
                f"got {rows!r}"
            )
    return {
        architecture: tuple(_parse_row(row, architecture, number) for number, row in enumerate(rows, start=1))
        for architecture, rows in found.items()
    }


def _parse_row(row: dict[str, Any], architecture: str, number: int) -> ChoiceRow:
    where = f"{TABLE_FILE}, row {number} for {architecture}"
    for key in ("forward", "backward", "measured"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise ValueError(f"{where}: {key} must be a text, got {row.get(key)!r}")
    asked: dict[bool, set[Feature]] = {True: set(), False: set()}
    head_dims: tuple[int, int] | None = None
    rows_below: int | None = None
    for key, value in row.items():
        match key, value:
            case (("forward" | "backward" | "measured"), _):
                pass
            case "head_dim", [bool(), _] | [_, bool()]:
                raise ValueError(f"{where}: head_dim = {value!r} must be two numbers, [smallest, largest]")
            case "head_dim", [int(smallest), int(largest)] if 1 <= smallest <= largest:
                head_dims = (smallest, largest)
            case "rows_below", int(limit) if limit >= 1 and not isinstance(value, bool):
                rows_below = limit
            case str(name), bool(is_asked) if name in _FEATURE_OF_KEY:
                asked[is_asked].add(_FEATURE_OF_KEY[name])
            case _:
                allowed = "head_dim = [smallest, largest], rows_below = 1 or more"
                raise ValueError(
                    f"{where}: {key} = {value!r} is no condition; allowed are {allowed}, and true or false for "
                    f"{', '.join(_FEATURE_OF_KEY)}"
                )
    return ChoiceRow(
        architecture=architecture,
        number=number,
        forward=row["forward"],
        backward=row["backward"],
        measured=row["measured"],
        head_dims=head_dims,
        wanted=frozenset(asked[True]),
        unwanted=frozenset(asked[False]),
        rows_below=rows_below,
    )
