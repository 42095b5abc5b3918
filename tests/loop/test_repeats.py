"""A prompt taken twice in a step gets two names."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ratoon.loop.repeats import tell_apart
from ratoon.rollout.draws import response_key
from ratoon.types import Prompt


@given(st.lists(st.sampled_from(["a", "b", "file:3", 7]), max_size=12))
def test_ids_differ_and_nothing_else_changes(ids: list[str | int]):
    prompts = [Prompt(id, np.array([index + 1]), text=str(index)) for index, id in enumerate(ids)]
    told = tell_apart(prompts)
    assert [prompt.text for prompt in told] == [prompt.text for prompt in prompts]
    assert len({prompt.id for prompt in told}) == len(ids)
    assert len({response_key(0, 0, prompt.id, 0) for prompt in told}) == len(ids)
    for index, (prompt, given_id) in enumerate(zip(told, ids, strict=True)):
        if given_id not in ids[:index]:
            assert prompt is prompts[index]
