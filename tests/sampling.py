"""What `make test` runs of a long list; `make test-full` runs all."""

from typing import Any

import pytest


def sampled(*values: Any, keep: int = 1) -> list[Any]:
    """For `parametrize`: the first `keep` values, and the others marked as long drills. A tuple is several values."""
    others = (value if isinstance(value, tuple) else (value,) for value in values[keep:])
    return [*values[:keep], *(pytest.param(*other, marks=pytest.mark.full) for other in others)]
