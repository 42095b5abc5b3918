"""The memory estimate against what a GPU's allocator gives out, in bfloat16."""

import pytest

from ratoon.bench.memory import CASES, MOST_OUT, measure


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_what_a_gpu_gives_out(name: str):
    predicted, measured = measure(CASES[name])
    for phase, num_bytes in measured.items():
        assert predicted[phase] == pytest.approx(num_bytes, rel=MOST_OUT), phase
