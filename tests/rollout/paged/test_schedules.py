"""Random schedules over a runner that knows what every block must hold."""

# Shape letters: P prompt tokens, R response tokens.

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.paged.drill import Drill
from transformers import PreTrainedTokenizerFast

MOVES = ("add", "add", "add in parts", "step", "step", "step", "update", "withdraw", "break", "go on", "go on")


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Moves with their numbers, the first of them an `add`. Sizes come from a seed: hypothesis prefers small ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = ["add", *draw(st.lists(st.sampled_from(MOVES), min_size=3, max_size=14))]
    return [(name, [int(rng.integers(1, most + 1)) for most in (14, 5, 16, 4)]) for name in names]


CASES = {
    "max_concurrent_responses": st.integers(1, 7),
    "block_tokens": st.integers(1, 5),
    "prefill_tokens": st.integers(1, 20),
    # Beyond the blocks that the largest response needs by itself; None: a cache that grows.
    "spare_blocks": st.none() | st.integers(0, 12),
    "restarts": st.booleans(),
    "steps_together": st.integers(1, 5),
    "schedule": schedules(),
}


@pytest.mark.parametrize("num_schedules", [150, pytest.param(1_000, marks=pytest.mark.full)])
def test_any_schedule_draws_what_each_response_alone_would(tokenizer: PreTrainedTokenizerFast, num_schedules: int):
    """Groups that come, wait, are pre-empted, withdrawn (as by an abort) and failed, that stop at a budget and go on,
    pauses between steps, weights that change: every group ends once, no block stays held, versions do not fall, and
    every token is what its response alone would draw.
    """

    @settings(max_examples=num_schedules, deadline=None)
    @given(**CASES)
    def check(**case: Any) -> None:
        run_schedule(tokenizer, **case)

    check()


def run_schedule(
    tokenizer: PreTrainedTokenizerFast,
    max_concurrent_responses: int,
    block_tokens: int,
    prefill_tokens: int,
    spare_blocks: int | None,
    restarts: bool,
    steps_together: int,
    schedule: list[tuple[str, list[int]]],
) -> None:
    added = [numbers for name, numbers in schedule if name.startswith("add")]
    least = max(-(-P // block_tokens) + -(-(R + steps_together - 2) // block_tokens) for P, _, R, _ in added)
    drill = Drill(
        tokenizer,
        max_concurrent_responses,
        None if spare_blocks is None else (least + spare_blocks) * block_tokens,
        block_tokens,
        prefill_tokens,
        restarts,
        steps_together,
    )
    for name, numbers in schedule:
        if name.startswith("add"):
            num_prompt_tokens, group_size, max_tokens, quarter = numbers
            budget = None if name == "add" else 1 + max_tokens // 3
            drill.add(num_prompt_tokens, group_size, max_tokens, 0.0 if quarter == 1 else 1.0, budget)
        elif name == "go on":
            ended = [*drill.finished, *drill.withdrawn]
            if ended:
                # One group may be gone on with twice: what it was is not touched.
                drill.go_on(ended[numbers[0] % len(ended)], None if numbers[3] == 1 else numbers[1])
        elif name == "step":
            for _ in range(numbers[0]):
                drill.step()
        elif name == "update":
            drill.update()
        elif name == "break":
            drill.runner.is_broken = True
        else:
            drill.withdraw([drill.groups[numbers[0] % len(drill.groups)]])
    drill.run_to_the_end()
    for group in (*drill.finished, *drill.withdrawn):
        drill.go_on(group)
    drill.run_to_the_end()
    drill.check_ends()
