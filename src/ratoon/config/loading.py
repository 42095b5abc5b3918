"""TOML file and command-line overrides to a checked recipe, and back."""

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ratoon.config.peer_names import OUR_KEYS
from ratoon.config.recipe import Recipe
from ratoon.types.errors import UserError

Table = dict[str, Any]

_TOML_WORDS = {"tuple_type": "a list", "model_type": "a table", "dict_type": "a table"}
"""By pydantic's type of error, what a recipe calls the Python type that its message asks for."""


_TEXT_KEYS = frozenset({"alphabet", "options", "pattern", "prompt_template", "stop", "system_prompt"})
"""Keys whose strings are texts of any characters. All others are names, paths and addresses."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `overrides` (`--a.b=v` or `--a.b v`) laid over it.

    Raises UserError, naming file, key, value got and values allowed, for anything wrong.
    """
    table = _read_table(path)
    for key, text in _override_texts(overrides):
        value = _toml_value(text)
        _set(table, key, text if not isinstance(value, str) and _is_plain_string(key) else value)
    _check_values(table, path, ())
    try:
        return Recipe.model_validate(_lists_to_tuples(table), strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: " + " ".join(_sentences(error))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as TOML. Keys that are not set (None) are left out."""
    return tomli_w.dumps(recipe.model_dump(exclude_none=True))


def changed_keys(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Dotted keys in which two recipes differ."""
    left, right = dict(_flatten(before.model_dump())), dict(_flatten(after.model_dump()))
    return tuple(key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key))


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """`["--a.b=1", "--c", "x"]` -> `[("a.b", 1), ("c", "x")]`. Values are TOML, or else strings."""
    return [(key, _toml_value(text)) for key, text in _override_texts(arguments)]


def _override_texts(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise UserError(f"override {argument!r} is not of the form --section.key=value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(
                    f"override {argument!r} has no value; write --section.key=VALUE, "
                    "or see `ratoon train --help` for the options there are"
                )
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def _is_plain_string(key: str) -> bool:
    """Whether a key takes a string and nothing else, unquoted ones like `2026` or `true` included."""
    *sections, name = key.split(".")
    section = _section_of(sections)
    if section is None or name not in section.model_fields:
        return False
    annotation = section.model_fields[name].annotation
    return set(get_args(annotation) or (annotation,)) <= {str, type(None)}


def _read_table(path: Path) -> Table:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such recipe file; give the path of a TOML file such as recipes/quickstart.toml"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give the path of a TOML file in it") from None
    except (PermissionError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); a recipe is a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except ValueError:  # Python reads no decimal number of more than 4,300 digits
        raise UserError(f"{path}: not a recipe: it holds a number of thousands of digits") from None
    except RecursionError:
        raise UserError(f"{path}: not a recipe: its tables or lists are nested too deeply") from None


def _toml_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        return text
    return table["value"] if len(table) == 1 else text  # a line break in `text` would begin another key


def _set(table: Table, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"override --{key}={value}: {section} is a value, not a section")
        table = typing.cast(Table, inner)
    table[last] = value


def _check_values(value: Any, path: Path, key: tuple[str, ...]) -> None:
    """What a type alone lets through, and what would be a failure of Python's where it is used."""
    if isinstance(value, dict):
        for name, inner in typing.cast(Table, value).items():
            _check_values(inner, path, (*key, name))
    elif isinstance(value, list):
        for inner in typing.cast(list[Any], value):
            _check_values(inner, path, key)
    # TOML's integers have 64 bits. Larger ones overflow late, and those of thousands of digits cannot be printed.
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{path}: {'.'.join(key)} is a whole number of more than 64 bits; give a smaller one")
    elif isinstance(value, str) and not value.isascii() and value != value.encode(errors="replace").decode():
        raise UserError(f"{path}: {'.'.join(key)} = {_shown(value)} is not UTF-8 text; give one that is")
    elif isinstance(value, str) and "\0" in value and not _TEXT_KEYS.intersection(key):
        raise UserError(f"{path}: {'.'.join(key)} = {_shown(value)} holds a null character, which no path or name may")


def _lists_to_tuples(value: Any) -> Any:
    """TOML arrays as the tuples that frozen configs hold."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(inner) for key, inner in typing.cast(Table, value).items()}
    if isinstance(value, list):
        return tuple(_lists_to_tuples(inner) for inner in typing.cast(list[Any], value))
    return value


def _flatten(table: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(typing.cast(Table, value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sentences(error: ValidationError) -> Iterator[str]:
    details = error.errors()
    for detail in details[:5]:
        yield _sentence(detail)
    if len(details) > 5:
        yield f"({len(details) - 5} more.)"


def _sentence(detail: ErrorDetails) -> str:
    location = [part for part in detail["loc"] if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).removeprefix(".")
    got = _shown(detail["input"])
    section, name = _section_of(location[:-1]), location[-1] if location else ""
    if detail["type"] == "extra_forbidden":
        allowed = sorted(section.model_fields) if section else []
        close = _keys_meant(name, allowed)
        meant = f" Did you mean {close[0]}?" if close else ""
        where = f"[{'.'.join(location[:-1])}]" if location[1:] else "a recipe"
        return f"{key} = {got} is not a key of {where}.{meant} Allowed: {', '.join(allowed)}."
    allowed = _allowed_values(section, name)
    if detail["type"] == "literal_error" and allowed:
        return f"{key} = {got}: there is no such choice. Allowed: {allowed}."
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):  # of a list of fixed length
        return f"{'.'.join(location)} = {got} is too short." + (f" Allowed: {allowed}." if allowed else "")
    if detail["type"] == "missing":
        described = section.model_fields[name].description if section and name in section.model_fields else None
        return f"{key} is missing and has no default." + (f" It is: {described}" if described else "")
    if detail["type"] == "value_error":
        if isinstance(detail["input"], dict):  # a rule over several keys of a section, which its message names
            return f"[{key}] {_reason(detail)}." if key else f"{_reason(detail)}."
        return f"{key} = {got}: {_reason(detail)}."
    return f"{key} = {got}: {_reason(detail)}." + (f" Allowed: {allowed}." if allowed else "")


def _keys_meant(name: str, allowed: Sequence[str]) -> list[str]:
    """By a name that is not `allowed` where it stands: the same name elsewhere, another library's, or the nearest."""
    ours = OUR_KEYS.get(name, "")
    own = ours.rpartition(".")[2]
    known = _keys_named(name) or [own if own in allowed else ours]
    return known if known != [""] else difflib.get_close_matches(name, allowed, n=1, cutoff=0.7)


def _keys_named(name: str) -> list[str]:
    """Dotted keys of other sections that have this very name."""
    sections = {key: _section_of([key]) for key in Recipe.model_fields}
    return [f"{key}.{name}" for key, section in sections.items() if section and name in section.model_fields]


def _reason(detail: ErrorDetails) -> str:
    if detail["type"] in _TOML_WORDS:
        return f"input should be {_TOML_WORDS[detail['type']]}"
    reason = detail["msg"].removeprefix("Value error, ")
    return (reason[0].lower() + reason[1:] if reason.startswith("Input should") else reason).rstrip(".")


def _shown(value: Any) -> str:
    text = repr(list(typing.cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _section_of(location: Sequence[str]) -> type[BaseModel] | None:
    """The config class at a dotted place of the recipe."""
    section: type[BaseModel] = Recipe
    for name in location:
        if name not in section.model_fields:
            return None
        annotation = section.model_fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return None
        section = models[0]
    return section


def _allowed_values(section: type[BaseModel] | None, name: str) -> str:
    """What a field takes, in words."""
    if section is None or name not in section.model_fields:
        return ""
    field = section.model_fields[name]
    bounds = [words for bound in field.metadata if (words := _bound_in_words(bound))]
    return " ".join([_type_in_words(field.annotation), " and ".join(bounds)]).strip()


def _bound_in_words(bound: object) -> str:
    match bound:
        case Ge(ge=limit):
            return f"at least {limit}"
        case Gt(gt=limit):
            return f"above {limit}"
        case Le(le=limit):
            return f"at most {limit}"
        case Lt(lt=limit):
            return f"below {limit}"
        case _:
            return ""


def _type_in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(repr(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_in_words(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        words = _type_in_words(arguments[0])
        if Ellipsis not in arguments:
            return f"a list of {len(arguments)}, each {words}"
        if get_origin(arguments[0]) is Literal:
            return f"a list of any of {words}"
        kind, with_word, rest = words.removeprefix("a ").partition(" with ")  # "a table with its, keys"
        return f"a list of {kind}s{with_word}{rest}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table with " + ", ".join(annotation.model_fields)
    plain: dict[Any, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return plain.get(annotation, "")
