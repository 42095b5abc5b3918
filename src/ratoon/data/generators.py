"""Rows made by reasoning-gym, and the package itself, which is optional."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ratoon.data.rows import SourceRow, cause_of, name_some
from ratoon.types.errors import UserError
from ratoon.types.extras import install_command

GENERATOR_KEY = "generator"
OPTIONS_KEY = "generator_options"


def import_reasoning_gym(key: str) -> ModuleType:
    """The package, or a UserError that says how to install it; `key` is the setting that needs it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"{key} needs the reasoning-gym package ({error}); install it with: {install_command('reasoning')}"
        ) from None
    return reasoning_gym


def create_generator(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """The reasoning-gym dataset `name`: `dataset[i]` is one entry, `score_answer(answer, entry)` scores one.

    Raises UserError for a name or options that reasoning-gym refuses.
    """
    gym = import_reasoning_gym("data.source")
    datasets: Mapping[str, tuple[type, type]] = gym.factory.DATASETS
    if name not in datasets:
        close = difflib.get_close_matches(name, datasets, cutoff=0.4)
        hint = f"closest: {name_some(close)}" if close else f"its {len(datasets)} names begin with {min(datasets)}"
        raise UserError(f'data.source: reasoning-gym has no generator "{name}"; {hint}')
    known = {field.name for field in dataclasses.fields(datasets[name][1])} - {"size", "seed"}
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known)
            hint = f"; did you mean {name_some(close)}?" if close else "."
            allowed = ", ".join(sorted(known)) or "none"
            raise UserError(f'data.options: "{name}" has no option "{option}"{hint} Its options are: {allowed}')
    try:
        return gym.create_dataset(name, size=size, seed=seed, **_typed_options(name, options))
    except Exception as error:
        raise UserError(f'data.options: "{name}" refuses {dict(options)}: {cause_of(error)}') from error


def generate_rows(
    name: str, options: Mapping[str, Any], *, size: int, seed: int, label: str | None = None
) -> list[SourceRow]:
    """`size` rows; a row's metadata is the whole entry, with the generator's name and options for its scorer.

    label: what ids begin with; the generator's name when None.
    """
    dataset = create_generator(name, options, size=size, seed=seed)
    rows: list[SourceRow] = []
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:
            raise UserError(
                f'data.source: "{name}" failed to make item {index} with {dict(options)}: {cause_of(error)}'
            ) from error
        answer = entry["answer"]
        rows.append(
            SourceRow(
                id=f"{label or name}:{index}",
                prompt=entry["question"],
                answer=None if answer is None else str(answer),  # None: many answers are right, the scorer knows
                metadata={**entry, GENERATOR_KEY: name, OPTIONS_KEY: dict(options)},
            )
        )
    return rows


def _typed_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    typed = dict(options)
    if name == "composite" and "datasets" in typed:
        from reasoning_gym.composite import DatasetSpec

        # a recipe can only hold tables, and config may be left out of one
        typed["datasets"] = [DatasetSpec(**{"config": {}, "weight": 1.0, **spec}) for spec in typed["datasets"]]
    return typed
