import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.data import PromptStream, StreamState
from ratoon.types import Prompt, UserError


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(index, [index + 1], str(index)) for index in range(count)]  # pyright: ignore[reportArgumentType]


def ids(prompts: list[Prompt]) -> list[str | int]:
    return [prompt.id for prompt in prompts]


@given(
    count=st.integers(1, 9),
    takes=st.lists(st.integers(0, 25), max_size=8),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    resume_after=st.integers(0, 8),
)
def test_any_takes_with_a_resume_anywhere_equal_one_pass(
    count: int, takes: list[int], seed: int, shuffle: bool, resume_after: int
):
    """prime-rl#745, OpenRLHF#1103: nothing is repeated or skipped; verl#5725, #7401: nor at epoch borders."""
    prompts = make_prompts(count)
    one_pass = ids(PromptStream(prompts, seed=seed, shuffle=shuffle).take(sum(takes)))
    stream = PromptStream(prompts, seed=seed, shuffle=shuffle)
    taken: list[str | int] = []
    for index, size in enumerate(takes):
        if index == resume_after:
            saved = json.dumps(asdict(stream.state()))
            stream = PromptStream(prompts, seed=seed, shuffle=shuffle)
            stream.restore(StreamState(**json.loads(saved)))
        taken += ids(stream.take(size))
    assert taken == one_pass
    for start in range(0, len(one_pass), count):
        epoch = Counter(one_pass[start : start + count])
        assert max(epoch.values()) == 1, "a prompt twice in one epoch"


def test_resume_at_an_epoch_boundary_goes_on_with_the_next_epoch():
    """verl#5725, verl#7401: the exhausted loader was restored and no step ran."""
    prompts = make_prompts(5)
    stream = PromptStream(prompts, seed=3, shuffle=True)
    stream.take(5)
    state = stream.state()
    assert (state.epoch, state.position) == (1, 0)
    resumed = PromptStream(prompts, seed=3, shuffle=True)
    resumed.restore(state)
    wanted = ids(stream.take(5))
    assert ids(resumed.take(5)) == wanted
    resumed.restore(replace(state, epoch=0, position=5))  # the same point, written the other way
    assert ids(resumed.take(5)) == wanted


def test_orders_differ_between_epochs_and_seeds_and_are_permutations():
    prompts = make_prompts(50)
    stream = PromptStream(prompts, seed=0, shuffle=True)
    first, second = ids(stream.take(50)), ids(stream.take(50))
    other = ids(PromptStream(prompts, seed=1, shuffle=True).take(50))
    assert sorted(first, key=int) == sorted(second, key=int) == sorted(other, key=int) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_the_order_is_the_same_on_every_machine():
    """A golden order: a change of it would break every checkpoint in the field."""
    assert ids(PromptStream(make_prompts(8), seed=0, shuffle=True).take(16)) == GOLDEN


GOLDEN: list[str | int] = [3, 2, 1, 6, 0, 7, 4, 5, 7, 4, 5, 1, 6, 2, 0, 3]


def test_without_shuffling_the_order_is_the_source_order():
    assert ids(PromptStream(make_prompts(3), seed=0, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_restored_stream_must_have_the_same_prompts_and_order():
    prompts = make_prompts(5)
    state = PromptStream(prompts, seed=0, shuffle=True).state()
    others = [
        PromptStream(prompts[:4], seed=0, shuffle=True),
        PromptStream(prompts[::-1], seed=0, shuffle=True),
        PromptStream([*prompts[:4], Prompt(4, [99], "4")], seed=0, shuffle=True),  # pyright: ignore[reportArgumentType]
        PromptStream(prompts, seed=1, shuffle=True),
        PromptStream(prompts, seed=0, shuffle=False),
    ]
    for other in others:
        with pytest.raises(UserError, match="other prompts"):
            other.restore(state)


def of_metadata(metadata: dict[Any, Any]) -> PromptStream:
    return PromptStream([Prompt("a", np.array([1]), metadata=metadata)], seed=0, shuffle=True)


def test_a_changed_column_is_refused_and_an_equal_one_is_not():
    """Rewards read the columns: a run must not go on with other ones in silence."""
    before = {"target": 3, "tags": {"x", "y", "z"}, (1, 2): {"b": [1.5], 4: None}}
    equal = {(1, 2): {4: None, "b": [1.5]}, "tags": {"z", "y", "x"}, "target": 3}
    of_metadata(equal).restore(of_metadata(before).state())
    for changed in ({"target": 4}, {"target": "3"}, {"tags": {"x"}}, {(1, 2): {"b": [1.25], 4: None}}, {"more": 1}):
        with pytest.raises(UserError, match="other prompts"):
            of_metadata(before | changed).restore(of_metadata(before).state())


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (0, 6)])
def test_a_damaged_position_is_refused(epoch: int, position: int):
    stream = PromptStream(make_prompts(5), seed=0, shuffle=True)
    with pytest.raises(UserError, match="damaged"):
        stream.restore(replace(stream.state(), epoch=epoch, position=position))


def test_nonsense_is_refused():
    with pytest.raises(UserError, match="no prompt"):
        PromptStream([], seed=0, shuffle=True)
    with pytest.raises(ValueError, match="must not be negative"):
        PromptStream(make_prompts(1), seed=0, shuffle=True).take(-1)
