import gc
import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.rewards import score
from ratoon.rewards.time_limit import TimeLimitedCalls, TimeLimitError
from ratoon.types import Prompt, Response, RolloutGroup, UserError


def make_group(count: int) -> RolloutGroup:
    responses = tuple(Response(np.array([index]), text=str(index)) for index in range(count))
    return RolloutGroup(Prompt("p7", np.array([1])), responses, advantages_N=np.ones(count))


def returning(values: Any) -> Any:
    def fixed(prompt: Prompt, responses: Sequence[Response]) -> Any:
        return values

    return fixed


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5, False],
        (True, Fraction(1, 2), 0),
        np.array([1, 0.5, 0], np.float32),
        [np.float32(1), np.float16(0.5), np.bool_(False)],
        [np.int64(1), 0.5, -0.0],
    ],
)
def test_numbers_of_all_kinds_are_rewards(values: Any):
    """OpenRLHF#1219: a score of 0 is a score."""
    group = score(make_group(3), returning(values))
    assert group.rewards_N is not None and group.rewards_N.dtype == np.float64
    assert group.rewards_N.tolist() == [1.0, 0.5, 0.0]
    assert group.advantages_N is None, "advantages of older rewards are stale"


def test_a_group_without_responses_scores_nothing():
    """verl#6310, TRL#6714: an empty group or response must not shift the rewards of others."""
    group = score(make_group(0), returning([]))
    assert group.rewards_N is not None and group.rewards_N.shape == (0,)


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        (None, "is None, not a number; return 0.0"),
        (math.nan, "is nan; rewards must be finite"),
        (-math.inf, "is -inf"),
        (np.float32("nan"), "is nan"),
        (10**400, "is inf"),
        (-1e308, "is -1e+308; rewards must lie within +-1e+15"),
        (Unprintable(), "is Unprintable"),
        ("1.0", "is str '1.0', not a number"),
        ([1.0], "is list"),
        ({"score": 1.0}, "is dict"),
        (1j, "is complex"),
        (torch.tensor(1.0), "is Tensor"),
        (np.array([1.0]), "is ndarray"),
        (b"x" * 1000, "..."),
    ],
)
def test_what_is_no_number_is_refused_with_its_place(bad: Any, wanted: str):
    with pytest.raises(UserError) as caught:
        score(make_group(3), returning([1.0, bad, 1.0]))
    message = str(caught.value)
    assert wanted in message
    assert "fixed of prompt 'p7', response 1," in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1.0, 2.0], "2 rewards for 3 responses"),
        ([1.0] * 4, "4 rewards for 3 responses"),
        (np.ones((3, 1)), r"shape \(3, 1\) for 3"),
        (np.array(1.0), r"shape \(\) for 3"),
        ("123", "returned str"),
        (None, "returned NoneType"),
        (1.0, "returned float"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict"),
        ((value for value in (1.0, 1.0, 1.0)), "returned generator"),
        (torch.ones(3), "returned Tensor"),
    ],
)
def test_anything_but_one_number_a_response_is_refused(values: Any, wanted: str):
    with pytest.raises(UserError, match=wanted):
        score(make_group(3), returning(values))


def test_calls_share_a_thread_until_one_is_given_up():
    calls = TimeLimitedCalls("reward test")
    first = calls(threading.get_ident, timeout_s=5.0)
    assert calls(threading.get_ident, timeout_s=5.0) == first != threading.get_ident()
    never = threading.Event()
    with pytest.raises(TimeLimitError):
        calls(never.wait, timeout_s=0.01)
    assert calls(threading.get_ident, timeout_s=5.0) != first
    never.set()  # the abandoned thread returns, finds its orders, and ends


def test_no_thread_outlives_its_reward_function():
    calls = TimeLimitedCalls("reward of a short life")
    calls(int, timeout_s=5.0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "reward of a short life"]
    del calls
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()
