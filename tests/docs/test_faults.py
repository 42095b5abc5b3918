"""docs/faults.md cites tests that exist and say what they cover."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
_REPORT = r"[A-Za-z][\w.-]*#\d+"
_CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_ROW = re.compile(rf"^\| (?P<reports>{_REPORT}(?:, {_REPORT})*) \| .*$", re.MULTILINE)


def docstrings(file: Path, test: str) -> str | None:
    """What a test and its module say; None where there is no such test."""
    module = ast.parse(file.read_text())
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test:
            comments = ast.get_source_segment(file.read_text(), node) or ""
            return f"{ast.get_docstring(module) or ''}\n{comments}"
    return None


def test_every_row_cites_tests_that_name_its_reports():
    rows = list(_ROW.finditer(PAGE.read_text()))
    assert len(rows) > 20
    for row in rows:
        cited = _CITED.findall(row[0])
        assert cited, f"no test is cited for {row['reports']}"
        said = ""
        for file, test in cited:
            found = docstrings(ROOT / file, test) if (ROOT / file).exists() else None
            assert found is not None, f"docs/faults.md cites {file}::{test}, which does not exist"
            said += found
        for report in row["reports"].split(", "):
            number = report[report.index("#") :]
            assert report in said or number in said, f"no test cited for {report} names it"
