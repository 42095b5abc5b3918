"""Commands and recipe keys that the documentation shows exist."""

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.recipe_tables import sections
from tests.docs.test_readme import PAGES, ROOT

from ratoon.cli.main import _parser, _split_overrides
from ratoon.config import Recipe

_OVERRIDE = re.compile(r"--(\w+(?:\.\w+)+)")
_KEY = re.compile(rf"`((?:{'|'.join(Recipe.model_fields)})(?:\.\w+)+)`")
_COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?ratoon (?P<arguments>[a-z][\w-]* .*)$", re.MULTILINE)
NOT_KEYS = {"section.key", "run.log"}
WRONG_ON_PURPOSE = {"trainer.num_step"}
"""Shown with the error that it gives."""


def keys() -> set[str]:
    fields = {f"{name}.{key}" for name, section in sections().items() for key in section.model_fields}
    return fields | set(sections())


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_keys_and_options_exist(page: Path):
    """The quick start in OpenRLHF's README used options that had been removed."""
    text = page.read_text().replace("\\\n", "")
    shown = {*_OVERRIDE.findall(text), *_KEY.findall(text)}
    assert shown - keys() <= NOT_KEYS | WRONG_ON_PURPOSE
    for found in _COMMAND.finditer(text):
        if not re.match(r"[\w ]+: ", found["arguments"]):  # our own error messages begin so
            _, given = _split_overrides(shlex.split(found["arguments"], comments=True))
            _, unknown = _parser().parse_known_args(given)
            assert not unknown, f"{found[0]}: {unknown}"
