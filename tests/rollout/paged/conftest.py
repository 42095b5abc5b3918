import pytest

from ratoon.rollout.engines.paged.engine import PagedEngine


@pytest.fixture
def engine_class() -> type[PagedEngine]:
    return PagedEngine
