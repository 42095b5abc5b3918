"""docs/faults.md cites tests that exist and say what they cover, and misses no report that matters."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NO_TEST = "–"
_REPORT = re.compile(r"(?P<repo>[A-Za-z][\w.-]*)?#(?P<number>\d+)")
_CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")

# Those that each cost their reporters a run, or many hours.
GRAVEST = """
NeMo-RL#2105 #4167, AReaL#1442, transformers#46634, verl#1270 #6268 #6068, TRL#6789 #4159 #4772 #5814 #5815,
NeMo-RL#2269, slime#2253, NeMo-RL#4222, verl#6984, zoo#1019, prime-rl#3350, slime#2308, verl#7524, NeMo-RL#3208,
labs-molt#68, verl#7106 #5694, SkyRL#1908, miles#465 #3277, verl#7155, prime-rl#1713 #3050 #3313, miles#1012,
TRL#6796 #6872 #7176 #5312 #5313, verl#7904 #5591 #7207, tinker#822, miles#2589, verl#5725 #7401 #7974,
NeMo-RL#3599 #3066, prime-rl#1712, verl#6673 #288, OpenRLHF#1219, TRL#5697 #5826 #5662 #6439 #6369, verl#6310,
OpenRLHF#1250, verl#6957, axolotl#3971
"""


class Row(NamedTuple):
    reports: str
    fault: str
    could_ours: str
    tests: str


def reports_in(text: str) -> set[str]:
    """Every `repo#number`; a number alone is of the repository named before it."""
    found: set[str] = set()
    repo = None
    for match in _REPORT.finditer(text):
        repo = match["repo"] or repo
        found.add(f"{repo}#{match['number']}")
    return found


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
    return [row for row in cells if row.reports != "report" and not row.reports.startswith("---")]


def docstrings(file: Path) -> dict[str, str]:
    """By name of a test, what it and its module say of themselves."""
    module = ast.parse(file.read_text())
    common = ast.get_docstring(module) or ""
    return {
        node.name: f"{common}\n{ast.get_docstring(node) or ''}"
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


ROWS = rows()


def test_the_page_is_read():
    assert len(ROWS) > 70
    assert reports_in("Covers TRL#5814/#5815, and NeMo-RL#2269.") == {"TRL#5814", "TRL#5815", "NeMo-RL#2269"}


@pytest.mark.parametrize("row", ROWS, ids=[row.reports for row in ROWS])
def test_a_row_cites_tests_that_name_its_reports(row: Row):
    reports = reports_in(row.reports)
    cited = _CITED.findall(row.tests)
    if not cited:
        assert row.tests == NO_TEST
        assert row.could_ours.startswith("not built yet: "), "what exists needs a test"
    named: set[str] = set()
    for file, test in cited:
        path = ROOT / file
        found = docstrings(path).get(test) if path.exists() else None
        assert found is not None, f"docs/faults.md cites {file}::{test}, which does not exist"
        assert not reports or reports & reports_in(found), f"{file}::{test} names none of {sorted(reports)}"
        named |= reports_in(found)
    assert not cited or reports <= named, f"no test cited names {sorted(reports - named)}"


def test_the_gravest_reports_are_on_the_page():
    assert reports_in(GRAVEST) <= {report for row in ROWS for report in reports_in(row.reports)}


def test_what_a_test_names_is_on_the_page():
    on_the_page = {report for row in ROWS for report in reports_in(row.reports)}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file != Path(__file__):
            for test, text in docstrings(file).items():
                missing = reports_in(text) - on_the_page
                assert not missing, f"{file.name}::{test} names {sorted(missing)}, which docs/faults.md has no row for"
