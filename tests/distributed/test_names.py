"""What `ratoon.distributed` offers is what the rest of Ratoon uses."""

import re
from pathlib import Path

import pytest

from ratoon import distributed

SOURCES = Path(distributed.__file__).parents[1]


@pytest.mark.parametrize("name", distributed.__all__)
def test_every_name_is_used_outside_of_it(name: str):
    """A switch that nothing throws is tested for years, and does nothing for anybody."""
    others = [file for file in SOURCES.rglob("*.py") if file.parent != Path(distributed.__file__).parent]
    assert any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in others)
