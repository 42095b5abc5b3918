"""The tables of docs/recipes.md, made from the recipe's own models.

`python -m tests.docs.recipe_tables` writes them into the page.
"""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ratoon.config import Recipe
from ratoon.config.peer_names import PEER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
_BLOCK = re.compile(r"<!-- table: (?P<section>[\w.]+) -->\n.*?<!-- end of table -->", re.DOTALL)
_PEERS = re.compile(r"<!-- peer names -->\n.*?<!-- end of peer names -->", re.DOTALL)


def sections() -> dict[str, type[BaseModel]]:
    """Dotted section name to its model, in the recipe's order."""
    return dict(_sections_of(Recipe, ""))


def table(section: type[BaseModel]) -> str:
    """One row for each key that is not a section itself."""
    rows = [_row(name, field) for name, field in section.model_fields.items() if not _model_of(field.annotation)]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def with_tables(text: str) -> str:
    """The page with every marked table made anew."""
    known = sections()

    def block(found: re.Match[str]) -> str:
        section = found["section"]
        return f"<!-- table: {section} -->\n{table(known[section])}\n<!-- end of table -->"

    peers = f"<!-- peer names -->\n{peer_table()}\n<!-- end of peer names -->"
    return _PEERS.sub(lambda _: peers, _BLOCK.sub(block, text))


def peer_table() -> str:
    """What other libraries call our keys."""

    def cell(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    rows = [f"| `{row.ours}` | {cell(row.trl)} | {cell(row.verl)} | {cell(row.openrlhf)} |" for row in PEER_NAMES]
    return "\n".join(["| here | TRL | verl | OpenRLHF |", "| --- | --- | --- | --- |", *rows])


def marked_sections(text: str) -> list[str]:
    return [found["section"] for found in _BLOCK.finditer(text)]


def _sections_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        if inner is not None:
            yield prefix + name, inner
            yield from _sections_of(inner, f"{prefix}{name}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {meaning} |"


def _type(field: FieldInfo) -> str:
    bounds = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {limit:,}" if isinstance(limit := getattr(entry, bound), int) else f"{sign} {limit}"
        for entry in field.metadata
        for bound, sign in bounds.items()
        if hasattr(entry, bound)
    ]
    return ", ".join([_type_name(field.annotation), *limits])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}s"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "boolean"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    if isinstance(value, str) and len(value) > 40:
        return "printable ASCII"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{}" if not value else tomli_w.dumps(value)
    shown = tomli_w.dumps({"value": value}, multiline_strings=False).removeprefix("value = ").strip()
    return " ".join(shown.split()).replace("[ ", "[").replace(", ]", "]")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
