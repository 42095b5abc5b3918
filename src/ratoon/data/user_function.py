"""A function in the user's own file, called by the names of its parameters."""

import copy
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from ratoon.data.rows import cause_of, name_some, shorten
from ratoon.data.user_paths import resolve_path
from ratoon.types.errors import UserError

PYTHON_PREFIX = "python:"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """Calls a function with those of its parameters that the values at hand can fill."""

    function: Callable[..., Any]
    label: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_everything: bool

    def __call__(self, known: Mapping[str, Any]) -> Any:
        """known: values by parameter name; all that are required must be there (`check_names`).

        The function gets copies: what it changes in them, it does not change in the data.
        """
        return self.function(**copy.deepcopy(self.choose(known)))

    def choose(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the values that the function takes; not copied."""
        names = known if self.takes_everything else [n for n in (*self.required, *self.optional) if n in known]
        return {name: known[name] for name in names}

    def check_names(self, always: Collection[str], columns: Collection[str], what: str) -> None:
        """Raises UserError if the function needs something that is neither in `always` nor a column of `what`."""
        check_names(self.label, self.required, always, columns, what)


def check_names(
    label: str, required: Collection[str], always: Collection[str], columns: Collection[str], what: str
) -> None:
    """Raises UserError if one of `required` is neither in `always` nor a column of `what`; label: who needs it."""
    for name in required:
        if name not in always and name not in columns:
            available = (*always, *sorted(set(columns) - set(always)))
            close = difflib.get_close_matches(name, available)
            hint = f'; did you mean "{close[0]}"?' if close else "."
            raise UserError(
                f'{label} asks for "{name}", which {what} does not have{hint} Parameters can be: {", ".join(available)}'
            )


def python_target(text: str) -> tuple[str, str] | None:
    """`python:FILE.py:FUNCTION` to (file, function); None for anything else."""
    if not text.startswith(PYTHON_PREFIX):
        return None
    file, _, function = text.removeprefix(PYTHON_PREFIX).rpartition(":")
    return file, function


def load_function(file: str, function: str, *, base_dir: Path, key: str, kind: str, needs: str) -> UserFunction:
    """The function called `function` in `file`, a path relative to `base_dir`.

    key: the recipe's key that names it. kind: what it is, for messages. needs: the parameter it should at least have.
    Raises UserError, with file and line, when there is no such file, when it does not run, when it has no such
    function, or when the function cannot be called by keyword.
    """
    path = resolve_path(file, base_dir=base_dir, key=key).resolve()
    label = f"{kind} {function}() in {path}"
    module = _run_file(path, key)
    found = vars(module).get(function)
    if not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(function, names) or names
        what = "is not a function" if function in vars(module) else "does not exist"
        raise UserError(f"{label} {what}; functions there: {name_some(close) or 'none'}")
    return _bind(found, label, needs)


def _bind(function: Callable[..., Any], label: str, needs: str) -> UserFunction:
    required: list[str] = []
    optional: list[str] = []
    takes_everything = False
    for name, parameter in inspect.signature(function).parameters.items():
        match parameter.kind:
            case Parameter.POSITIONAL_ONLY:
                raise UserError(f'{label} is called by keyword, but "{name}" is positional only; remove the "/"')
            case Parameter.VAR_POSITIONAL:
                pass
            case Parameter.VAR_KEYWORD:
                takes_everything = True
            case _:
                (required if parameter.default is Parameter.empty else optional).append(name)
    if not (required or optional or takes_everything):
        raise UserError(f'{label} takes no parameter; it needs at least "{needs}"')
    return UserFunction(function, label, tuple(required), tuple(optional), takes_everything)


def _run_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{key}: {path} does not exist; paths are relative to the recipe")
    # One name a path: two files called rewards.py must not be one module.
    digest = hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()
    name = f"ratoon_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}, which ends in .py"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: the file may import its neighbours, which shadow nothing
    sys.modules[name] = module  # dataclasses and pickle look the module up by its name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise UserError(
            f"{key}: {error.filename or path}:{error.lineno or 1}: {type(error).__name__}: {shorten(error.msg)}"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exit() and asyncio.CancelledError too
        del sys.modules[name]
        raise UserError(f"{key}: {_place(error, path)}: {cause_of(error)}") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """file:line of the innermost frame in the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
