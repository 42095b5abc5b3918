"""docs/attention.md names every implementation."""

from pathlib import Path

from ratoon.attention import available_impls

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


def test_every_implementation_is_described():
    page = PAGE.read_text()
    for status in available_impls():
        assert f"`{status.impl}`" in page
        assert not status.provider or f"`{status.provider}`" in page
