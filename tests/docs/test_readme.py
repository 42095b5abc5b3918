"""What the README shows runs, and prints what it says."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch

from ratoon.config import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PRINTED = re.compile(r"^ *print\(.*\)  # (?P<text>.*)$", re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_python_blocks_run_in_order_and_print_what_they_say():
    names: dict[str, object] = {"__name__": "readme"}
    shown: list[str] = []
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate(blocks("python"), start=1):
            exec(compile(block, f"README.md, python block {number}", "exec"), names)
            shown += [found["text"] for found in _PRINTED.finditer(block)]
    assert len(shown) >= 5
    assert printed.getvalue().splitlines() == shown


def test_recipes_shown_load(tmp_path: Path):
    """Parts of recipes too, with what they lack from the first one shown."""
    recipes = [tomllib.loads(text) for text in blocks("toml")]
    assert recipes
    for number, recipe in enumerate(recipes):
        path = tmp_path / f"{number}.toml"
        path.write_text(tomli_w.dumps({**recipes[0], **recipe}))
        load_recipe(path)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
