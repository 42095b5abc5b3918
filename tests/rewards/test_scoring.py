"""What a pool makes of groups when all goes well, and what numbers it takes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.rewards.pools import RUNS_THE_RESPONSE, cut, group_of, open_pool, rewards_of, scored

from ratoon.rewards import RewardPool, ScoredGroups
from ratoon.types import Prompt, Response, RolloutGroup, UserError


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    with open_pool(tmp_path_factory.mktemp("rewards"), RUNS_THE_RESPONSE) as pool:
        yield pool


def test_numbers_of_all_kinds_are_rewards(pool: RewardPool):
    """OpenRLHF#1219: a score of 0 is a score."""
    texts = (
        "value = 1", "value = 0", "value = 0.0", "value = -0.0", "value = False", "value = True",
        "from fractions import Fraction; value = Fraction(1, 2)",
        "import numpy; value = numpy.float32(0.5)", "import numpy; value = numpy.float16(0)",
        "import numpy; value = numpy.bool_(True)", "import numpy; value = numpy.int64(3)", "value = 0.1",
    )  # fmt: skip
    (group,) = pool.score_now([group_of(*texts)]).groups
    assert group.rewards_N is not None and group.rewards_N.dtype == np.float64
    assert group.rewards_N.tolist() == [1, 0, 0, 0, 0, 1, 0.5, 0.5, 0, 1, 3, 0.1]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("value = None", "is None, not a number; return 0.0"),
        ("value = float('nan')", "is nan; rewards must be finite"),
        ("value = -float('inf')", "is -inf"),
        ("import numpy; value = numpy.float32('nan')", "is nan"),
        ("value = 10**400", "is inf"),
        ("value = -1e308", "is -1e+308; rewards must lie within +-1e+15"),
        ("class Unprintable:\n def __repr__(self): raise RuntimeError\nvalue = Unprintable()", "is Unprintable"),
        ("import numbers\nclass R(float):\n def __float__(self): return 1/0\nvalue = R()", "ZeroDivisionError"),
        ("value = '1.0'", "is str '1.0', not a number"),
        ("value = [1.0]", "is list"),
        ("value = {'score': 1.0}", "is dict"),
        ("value = 1j", "is complex"),
        ("value = lambda: 1", "is function"),
        ("import numpy; value = numpy.array([1.0])", "is ndarray"),
        ("value = b'x' * 1000", "..."),
        ("class Tensor:\n def __float__(self): return 1.0\nvalue = Tensor()", "is Tensor"),
        ("async def f(): return 1\nasync def g(): return f()\nvalue = g()", "is coroutine"),
    ],
)
def test_what_is_no_number_is_refused_with_its_place(pool: RewardPool, code: str, wanted: str):
    with pytest.raises(UserError) as caught:
        scored(pool, "value = 1", code)
    message = str(caught.value)
    assert wanted in message
    assert "reward \"python:mine.py:score\" of prompt 'rows.jsonl:7', response 1," in message
    assert len(message) < 400


@pytest.mark.full
def test_a_tensor_is_no_number(pool: RewardPool):
    """The real one; the worker takes seconds to import torch."""
    with pytest.raises(UserError, match="is Tensor"):
        scored(pool, "import torch; value = torch.tensor(1.0)")


def test_a_group_without_responses_scores_nothing(pool: RewardPool):
    """verl#6310, TRL#6714: an empty group or response must not shift the rewards of others."""
    empty = Response(np.array([], np.int64), text="value = 3")
    groups = [
        group_of("value = 1", "value = 2"),
        RolloutGroup(Prompt("none", np.array([1])), ()),
        RolloutGroup(Prompt("p", np.array([1])), (empty, Response(np.array([1]), text="value = 4"))),
    ]
    found = pool.score_now(groups)
    assert [rewards_of(group) for group in found.groups] == [[1, 2], [], [3, 4]]
    assert pool.score_now([]).groups == ()
    assert pool.score_now(groups[1:2]).groups[0].group_size == 0


def test_advantages_of_older_rewards_do_not_survive(pool: RewardPool):
    older = RolloutGroup(Prompt("p", np.array([1])), group_of("value = 1").responses, advantages_N=np.ones(1))
    assert pool.score_now([older]).groups[0].advantages_N is None


def test_scores_come_back_in_order_whatever_the_number_of_workers(tmp_path: Path):
    source = (
        "import time\ndef score(response, level):\n    time.sleep((int(response) * 7 % 5) / 2000)\n"
        "    return int(response) + 100 * level\n"
    )
    groups = [group_of(*map(str, range(size)), id=f"p{size}", level=size) for size in (1, 17, 0, 40, 3)]
    found: list[list[list[float]]] = []
    for num_workers in (1, 3):
        with open_pool(tmp_path, source, num_workers=num_workers) as pool:
            found.append([rewards_of(group) for group in pool.score_now(groups).groups])
    assert found[0] == found[1] == [[i + 100 * size for i in range(size)] for size in (1, 17, 0, 40, 3)]


def test_several_event_loops_and_concurrent_calls_share_a_pool(tmp_path: Path):
    async def score_twice(pool: RewardPool) -> tuple[ScoredGroups, ScoredGroups]:
        return await asyncio.gather(pool.score([group_of("ab")]), pool.score([group_of("abc", "")]))

    with open_pool(tmp_path, "def score(response):\n    return len(response)\n", num_workers=2) as pool:
        for _ in range(2):
            first, second = asyncio.run(score_twice(pool))
            assert rewards_of(first.groups[0]) == [2]
            assert rewards_of(second.groups[0]) == [3, 0]


def test_a_cancelled_call_takes_its_samples_back(tmp_path: Path):
    source = "import time\ndef score(response):\n    time.sleep(float(response))\n    return 1\n"

    async def cancel_and_go_on(pool: RewardPool) -> ScoredGroups:
        slow = asyncio.create_task(pool.score([group_of(*["0.3"] * 100)]))
        await asyncio.sleep(0.1)
        slow.cancel()
        return await asyncio.wait_for(pool.score([group_of("0")]), 20.0)  # 100 sleeps would take 30 s

    with open_pool(tmp_path, source) as pool:
        pool.check([])
        assert rewards_of(asyncio.run(cancel_and_go_on(pool)).groups[0]) == [1]


def test_an_async_with_closes_the_pool(tmp_path: Path):
    async def use() -> RewardPool:
        async with open_pool(tmp_path, "def score(response):\n    return 1\n") as pool:
            await pool.score([group_of("a")])
        return pool

    pool = asyncio.run(use())
    with pytest.raises(RuntimeError, match="closed"):
        pool.score_now([group_of("a")])
    pool.close()


def test_cut_responses_score_zero_unseen_if_so_told(tmp_path: Path):
    source = "def score(response):\n    return 1 / len(response)\n"
    group = cut(group_of("", "abcd", ""), 0, 2)
    with open_pool(tmp_path, source, score_truncated=False) as pool:
        found = pool.score_now([group])
        assert rewards_of(found.groups[0]) == [0, 0.25, 0]
        assert found.failures.num_failures == 0
    with open_pool(tmp_path, source) as pool, pytest.raises(UserError, match="ZeroDivisionError"):
        pool.score_now([group])


def test_components_are_weighted_added_and_recorded(tmp_path: Path):
    source = (
        "def length(response):\n    return len(response)\n"
        "def many(responses):\n    return [len(responses)] * len(responses)\n"
    )
    components = [
        {"function": "python:mine.py:length", "weight": 0.5},
        {"function": "python:mine.py:many", "weight": -1},
        {"function": "exact-match", "name": "right", "weight": 10},
        {"function": "regex", "pattern": "b", "weight": 0},
        {"function": "soft-overlong", "buffer_tokens": 40},
    ]
    texts = ("4", "abc", "")
    tokens = (80, 100, 0)
    responses = tuple(Response(np.ones(n, np.int64), text=text) for n, text in zip(tokens, texts, strict=True))
    group = cut(RolloutGroup(group_of().prompt, responses), 1)
    with open_pool(tmp_path, source, components=components) as pool:
        found = pool.score_now([group, RolloutGroup(group.prompt, ())])
    parts = {name: values.tolist() for name, values in found.groups[0].reward_components.items()}
    assert parts == {
        "length": [1, 3, 0], "many": [3, 3, 3], "right": [1, 0, 0], "regex": [0, 1, 0],
        "soft_overlong": [-0.5, -1, 0],
    }  # fmt: skip
    assert rewards_of(found.groups[0]) == [0.5 - 3 + 10 - 0.5, 1.5 - 3 - 1, -3]
    metrics = found.metrics()
    assert metrics["reward_length_mean"] == pytest.approx(4 / 3)
    assert metrics["reward_soft_overlong_mean"] == -0.5
    assert metrics["reward_failures"] == metrics["reward_dropped"] == 0
    with open_pool(tmp_path, source, components=components, score_truncated=False) as pool:
        unseen = pool.score_now([group]).groups[0]
    assert unseen.reward_components["many"].tolist() == [2, 0, 2]
    assert unseen.reward_components["soft_overlong"].tolist() == [-0.5, -1, 0], "it judges cut responses all the same"


def test_a_single_reward_is_its_own_component(pool: RewardPool):
    found = pool.score_now([group_of("value = 2")])
    assert found.groups[0].reward_components["score"].tolist() == [2.0]
    assert "reward_score_mean" not in found.metrics(), "it would repeat reward_mean"


def test_length_shaping_alone_needs_no_process(tmp_path: Path):
    with open_pool(tmp_path, function="soft-overlong", buffer_tokens=100) as pool:
        pool.check([group_of().prompt], columns=())
        assert rewards_of(asyncio.run(pool.score([group_of("a")])).groups[0]) == [-0.01]
    with pytest.raises(UserError, match=r"buffer_tokens = 101 is more than rollout\.max_response_tokens = 100"):
        open_pool(tmp_path, function="soft-overlong", buffer_tokens=101)


def test_a_weighted_sum_of_absurd_size_is_refused(tmp_path: Path):
    components = [{"function": "python:mine.py:score", "weight": 1e6}]
    with (
        open_pool(tmp_path, "def score(response):\n    return 1e12\n", components=components) as pool,
        pytest.raises(UserError, match=r"weighted sum .* is 1e\+18"),
    ):
        scored(pool, "a")


def test_metadata_that_cannot_travel_is_named(pool: RewardPool):
    with pytest.raises(UserError, match=r"metadata of prompt 'rows\.jsonl:7' cannot be sent"):
        pool.score_now([group_of("value = 1", odd=lambda: 1)])
