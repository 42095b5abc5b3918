"""docs/kernels.md's recipe compiles what it says it compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_recipe_compiles_a_kernel_for_hopper():
    """In a process of its own: this one may interpret Triton's kernels."""
    pytest.importorskip("triton")
    text = PAGE.read_text()
    start = text.index("```py\nimport re, subprocess") + len("```py\n")
    recipe = text[start : text.index("```", start)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", recipe],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "REG:168" in done.stdout and "0 bytes spill stores" in done.stdout
    assert "C75" not in done.stdout, "ptxas waits for every product"
