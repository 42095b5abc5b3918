"""docs/recipes.md says what the recipe's models say."""

from pathlib import Path

import pytest
from tests.docs.recipe_tables import PAGE, marked_sections, sections, with_tables

from ratoon.config import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def test_every_section_has_its_table():
    assert sorted(marked_sections(PAGE.read_text())) == sorted(sections())


def test_every_key_is_documented_as_it_is():
    page = PAGE.read_text()
    wanted = with_tables(page)
    missing = sorted(set(wanted.splitlines()) - set(page.splitlines()))
    assert page == wanted, (
        "docs/recipes.md differs from the recipe's models; run `python -m tests.docs.recipe_tables`. "
        f"First missing line: {missing[:1]}"
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.name for path in RECIPES])
def test_shipped_recipes_load_and_are_described(recipe: Path):
    assert load_recipe(recipe).run.name == recipe.stem
    assert recipe.name in PAGE.read_text()
