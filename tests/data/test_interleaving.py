"""Sources share a run by weight, at every moment of it."""

import json
from collections import Counter
from dataclasses import asdict, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.data import PromptStream, StreamState
from ratoon.data.interleaving import exact_shares, next_source
from ratoon.types import Prompt, UserError

WEIGHTS = st.lists(
    st.floats(0.01, 100.0) | st.integers(1, 9).map(float) | st.sampled_from([0.1, 0.2, 0.7, 1e-6, 1e6]),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(weights=WEIGHTS)
def test_every_prefix_is_within_one_of_the_exact_shares(weights: list[float]):
    shares = exact_shares(weights)
    assert sum(shares) == 1
    taken = [0] * len(weights)
    for turn in range(1, 120):
        taken[next_source(taken, shares)] += 1
        assert all(abs(count - turn * share) < 1 for count, share in zip(taken, shares, strict=True))


def test_a_rhythm_that_people_expect():
    shares = exact_shares([1.0, 2.0, 1.0])
    taken, order = [0, 0, 0], ""
    for _ in range(8):
        index = next_source(taken, shares)
        taken[index] += 1
        order += "abc"[index]
    assert order == "babcbabc"
    assert exact_shares([3.0, 1.0]) == (Fraction(3, 4), Fraction(1, 4))


def make_prompts(**sizes: int) -> list[Prompt]:
    return [
        Prompt(f"{name}:{index}", [index + 1], metadata={"ratoon_source": name})  # pyright: ignore[reportArgumentType]
        for name, size in sizes.items()
        for index in range(size)
    ]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
    takes=st.lists(st.integers(0, 15), min_size=1, max_size=6),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_resume_anywhere_equals_one_pass_and_sources_keep_their_epochs(
    sizes: list[int], data: st.DataObject, takes: list[int], seed: int, shuffle: bool
):
    """NeMo-RL#3599, verl#7974: no prompt of any source is skipped or repeated by a resume."""
    names = [f"s{index}" for index in range(len(sizes))]
    prompts = make_prompts(**dict(zip(names, sizes, strict=True)))
    weights = {name: data.draw(st.floats(0.1, 10.0)) for name in names}

    def stream() -> PromptStream:
        return PromptStream(prompts, seed=seed, shuffle=shuffle, weights=weights)

    one_pass = [str(prompt.id) for prompt in stream().take(sum(takes))]
    resumed, taken = stream(), list[str]()
    for size in takes:
        state = StreamState(**json.loads(json.dumps(asdict(resumed.state()))))
        resumed = stream()
        resumed.restore(state)
        taken += [str(prompt.id) for prompt in resumed.take(size)]
    assert taken == one_pass
    for name, size in zip(names, sizes, strict=True):
        own = [id for id in one_pass if id.startswith(f"{name}:")]
        for start in range(0, len(own), size):
            assert max(Counter(own[start : start + size]).values()) == 1, "a prompt twice in one epoch of its source"


def test_small_sources_are_repeated_and_the_passes_counted():
    stream = PromptStream(make_prompts(big=9, small=2), seed=0, shuffle=True, weights={"big": 3.0, "small": 1.0})
    counts = Counter(str(prompt.id) for prompt in stream.take(12))
    assert sum(count for id, count in counts.items() if id.startswith("big")) == 9
    assert [count for id, count in counts.items() if id.startswith("small")] == [2, 1]
    assert stream.passes == {"big": 1.0, "small": 1.5}
    assert PromptStream(make_prompts(a=2), seed=0, shuffle=True).passes == {}


def test_sources_do_not_shuffle_alike():
    stream = PromptStream(make_prompts(a=20, b=20), seed=0, shuffle=True, weights={"a": 1.0, "b": 1.0})
    ids = [str(prompt.id) for prompt in stream.take(40)]
    orders = [[id[2:] for id in ids if id.startswith(name)] for name in ("a:", "b:")]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_one_weighted_source_is_an_ordinary_stream():
    prompts = make_prompts(a=7)
    weighted = PromptStream(prompts, seed=3, shuffle=True, weights={"a": 2.0}).take(20)
    assert weighted == PromptStream(prompts, seed=3, shuffle=True).take(20)


def test_other_weights_do_not_fit_and_damaged_counts_are_refused():
    prompts = make_prompts(a=3, b=5)
    stream = PromptStream(prompts, seed=0, shuffle=True, weights={"a": 1.0, "b": 1.0})
    stream.take(6)
    state = stream.state()
    assert (state.epoch, state.position, state.taken) == (0, 6, {"a": 3, "b": 3})
    for weights in ({"a": 1.0, "b": 2.0}, None):
        with pytest.raises(UserError, match="other prompts, or in another order"):
            PromptStream(prompts, seed=0, shuffle=True, weights=weights).restore(state)
    for taken in ({}, {"a": 3}, {"a": 3, "b": 4}, {"a": 6, "b": 0}, {"a": 7, "b": -1}):
        with pytest.raises(UserError, match="damaged"):
            stream.restore(replace(state, taken=taken))


def test_a_source_without_prompts_is_refused():
    with pytest.raises(UserError, match='source "b" has no prompt to train on'):
        PromptStream(make_prompts(a=3), seed=0, shuffle=True, weights={"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="prompt 'b:0' is of source 'b', which has no weight"):
        PromptStream(make_prompts(a=3, b=1), seed=0, shuffle=True, weights={"a": 1.0})
