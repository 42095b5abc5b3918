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
from ratoon.view import RunSummary, final_page

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


def without_figures(line: str) -> str:
    """A line of the page without what differs from run to run; spaces between words stay."""
    return re.sub(r" *[\d.,]+(m \d+s|s|%)?|[█░]+", "#", line)


def test_the_page_of_the_demo_reads_as_a_run_prints_it_today():
    """But for figures, and for the order of phases, which is theirs."""
    shown = (ROOT / "README.md").read_text().partition("<!-- demo output -->\n```text\n")[2].partition("```")[0]
    run_dir = Path("runs/quickstart-seed0")
    phases = ("sft", "generate", "update", "reward", "evaluate", "publish", "checkpoint", "plan")
    printed = final_page(
        RunSummary(
            run_name=run_dir.name,
            run_dir=run_dir,
            train_command=f"ratoon train recipes/quickstart.toml --run.seed 0 --run.name {run_dir.name}",
            num_steps_done=150,
            num_steps=150,
            seconds_by_phase=dict.fromkeys(phases, 1.0),
            wall_s=100.0,
            num_logical_tokens=2_188_415,
            num_computed_rows=316_415,
            num_response_tokens=192_000,
            reward_before=0.259,
            reward_after=0.955,
            num_heldout_responses=256,
            memory_peak_gib=0.18,
            memory_predicted_gib=0.1,
            checkpoint=run_dir / "checkpoints" / "step-000150",
        )
    )
    assert sorted(map(without_figures, shown.splitlines())) == sorted(
        without_figures(line.text) for line in printed if line.text
    )
