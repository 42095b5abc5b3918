"""Prompts, responses and groups: what they accept, what they refuse by name, and that they stay as built."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SampledSupport

BAD_TOKEN_IDS: list[tuple[Any, str]] = [
    ([1, -100], r"must lie in \[0, 2\*\*31\), got -100 to 1; padding or ignore indices \(such as -100\)"),
    ([2**31], "got 2147483648 to 2147483648"),
    ([2**63], "got 9223372036854775808"),
    ([2**70], "1-D array or list of integers"),
    ([[1, 2], [3, 4]], r"got shape \(2, 2\)"),
    (3, r"got shape \(\)"),
    ([1.0, 2.0], "of float64"),
    ([True, False], "of bool"),
    (["1"], "1-D array or list of integers"),
    ("12", "1-D array or list of integers"),
    ([None], "of object"),
    (None, r"got shape \(\) of object"),
    (np.zeros((0, 3), np.int64), r"got shape \(0, 3\)"),
]


@pytest.mark.parametrize(("token_ids", "message"), BAD_TOKEN_IDS)
def test_bad_token_ids_are_refused_with_their_owner(token_ids: Any, message: str):
    with pytest.raises(ValueError, match=message) as error:
        Prompt("gsm8k/7", token_ids)
    assert "prompt 'gsm8k/7'" in str(error.value)
    with pytest.raises(ValueError, match=message) as error:
        Response(token_ids)
    assert str(error.value).startswith("response")


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"prompt 7 is empty, but the first response token.*BOS"):
        Prompt(7, np.empty(0, np.int64))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_array_becomes_int64(dtype: Any):
    given_ids: Any = np.asarray([1, 2, 255], dtype)
    prompt = Prompt("p", given_ids)
    assert prompt.token_ids.dtype == np.int64
    assert prompt.token_ids.tolist() == [1, 2, 255]
    assert prompt.num_tokens == 3


@given(st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_lists_are_kept_whole(tokens: list[int]):
    given_ids: Any = tokens
    response = Response(given_ids)
    assert response.token_ids.tolist() == tokens
    assert response.token_ids.dtype == np.int64


def test_arrays_are_copies_and_read_only():
    tokens = np.asarray([1, 2])
    logprobs = np.asarray([-1.0, -2.0], np.float32)
    versions = np.asarray([3, 4])
    prompt = Prompt("p", tokens)
    response = Response(tokens, rollout_logprobs=logprobs, policy_versions=versions)
    tokens[0], logprobs[0], versions[0] = 9, -9, 9
    held = [prompt.token_ids, response.token_ids, response.rollout_logprobs, response.policy_versions]
    assert [array[0] for array in held if array is not None] == [1, 1, -1, 3]
    for array in held:
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


@pytest.mark.parametrize(("name", "value"), [("token_ids", [1]), ("finish_reason", FinishReason.STOP)])
def test_fields_cannot_be_replaced(name: str, value: Any):
    with pytest.raises(FrozenInstanceError):
        setattr(Response(np.asarray([1])), name, value)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([-1.0], r"rollout_logprobs must hold one entry for each of 2 response tokens, got shape \(1,\)"),
        ([[-1.0, -2.0]], r"got shape \(1, 2\)"),
        ([-1.0, float("nan")], "not NaN"),
        ([-1.0, 0.5], "<= 0"),
        ([-1.0, float("inf")], "<= 0"),
    ],
)
def test_bad_logprobs_are_refused(logprobs: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Response(np.asarray([1, 2]), rollout_logprobs=logprobs)


def test_logprobs_may_be_zero_up_to_rounding_or_minus_infinity():
    given_logprobs: Any = [0.0, 1e-6, float("-inf")]
    response = Response(np.asarray([1, 2, 3]), rollout_logprobs=given_logprobs)
    assert response.rollout_logprobs is not None
    assert response.rollout_logprobs.dtype == np.float32


def test_policy_versions_belong_to_tokens():
    with pytest.raises(ValueError, match=r"policy_versions must hold one entry for each of 2 response tokens"):
        Response(np.asarray([1, 2]), policy_versions=np.asarray([0]))


def support(*kept: list[int]) -> SampledSupport:
    return SampledSupport.of([np.array(ids, np.int32) for ids in kept])


@pytest.mark.parametrize(
    ("offsets", "token_ids", "message"),
    [
        ([1, 2], [5, 6], "must rise from 0"),
        ([], [], "must rise from 0"),
        ([[0, 1]], [5], "must rise from 0"),
        ([0, 2, 2], [5, 6], "at least one kept token for each response token"),
        ([0, 2, 1], [5, 6], "must rise from 0"),
        ([0, 2], [5, 6, 7], r"must hold 2 kept token ids, got shape \(3,\)"),
        ([0, 2], [6, 5], "in ascending order"),
        ([0, 1, 3], [9, 5, 5], "distinct"),
        ([0, 2], [-1, 5], "not negative"),
    ],
)
def test_bad_supports_are_refused(offsets: Any, token_ids: Any, message: str):
    with pytest.raises(ValueError, match=message):
        SampledSupport(offsets, token_ids)


def test_a_support_is_a_read_only_copy():
    ids = np.array([2, 3, 1], np.int32)
    held = SampledSupport(np.array([0, 2, 3]), ids)
    ids[0] = 1
    assert held.token_ids.tolist() == [2, 3, 1] and held.num_tokens == 2
    for array in (held.offsets, held.token_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


@given(st.lists(st.lists(st.sets(st.integers(0, 9), min_size=1), max_size=4), max_size=4))
def test_supports_are_concatenated_in_order(kept: list[list[set[int]]]):
    parts = [support(*(sorted(ids) for ids in response)) for response in kept]
    whole = SampledSupport.concatenate(parts)
    flat = [sorted(ids) for response in kept for ids in response]
    assert [ids.tolist() for ids in np.split(whole.token_ids, whole.offsets[1:-1])][: len(flat)] == flat
    assert whole.num_tokens == len(flat)


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 5)), max_size=6))
def test_missing_tokens_are_found(pairs: list[tuple[set[int], int]]):
    kept = support(*(sorted(ids) for ids, _ in pairs))
    expected = [index for index, (ids, token) in enumerate(pairs) if token not in ids]
    assert kept.missing(np.array([token for _, token in pairs], np.int64)).tolist() == expected


def test_a_response_was_drawn_among_its_support():
    response = Response(np.asarray([4, 6]), support=support([4, 5], [6]))
    assert response.support is not None and response.support.num_tokens == 2
    with pytest.raises(ValueError, match="support is of 1 tokens, the response has 2"):
        Response(np.asarray([4, 6]), support=support([4]))
    with pytest.raises(ValueError, match="response token 1, 6, is not among the tokens"):
        Response(np.asarray([4, 6]), support=support([4, 5], [7]))
    assert Response(np.empty(0, np.int64), support=support()).num_tokens == 0


def test_an_empty_response_is_legal():
    empty = np.empty(0, np.int64)
    response = Response(empty, rollout_logprobs=np.empty(0, np.float32), policy_versions=empty)
    assert response.num_tokens == 0
    assert not response.is_truncated


@pytest.mark.parametrize("reason", list(FinishReason))
def test_only_a_spent_budget_is_truncation(reason: FinishReason):
    assert Response(np.asarray([1]), finish_reason=reason).is_truncated == (reason is FinishReason.LENGTH)


def group(*lengths: int, **fields: Any) -> RolloutGroup:
    responses: Any = [Response(np.full(length, index)) for index, length in enumerate(lengths)]
    return RolloutGroup(Prompt("p", np.asarray([1, 2, 3])), responses, **fields)


def test_sizes_of_a_group():
    four = group(2, 0, 5, 1)
    assert (four.group_size, four.response_lengths) == (4, (2, 0, 5, 1))
    assert four.num_rows == 3 + 8
    assert four.num_logical_tokens == 4 * 3 + 8
    assert isinstance(four.responses, tuple)
    assert group().num_logical_tokens == 0


@pytest.mark.parametrize("name", ["rewards_N", "advantages_N"])
@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], 1.0])
def test_one_number_for_each_response(name: str, values: Any):
    with pytest.raises(ValueError, match=rf"prompt 'p': {name} must be \[2\], one for each response, got shape"):
        group(1, 1, **{name: values})


def test_rewards_are_copies_and_read_only():
    rewards = np.asarray([1.0, 0.0])
    two = group(1, 1, rewards_N=rewards)
    rewards[0] = 7.0
    assert two.rewards_N is not None
    assert two.rewards_N.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        two.rewards_N[0] = 5.0


@pytest.mark.parametrize("num_tokens", [2, 4, 6])
def test_routes_are_of_prompt_and_response(num_tokens: int):
    """verl#6046, verl#6089: doubled where a partial rollout went on; of more tokens than a response that was cut."""
    response = Response(np.asarray([7, 8]), routed_experts=np.zeros((num_tokens, 1, 2), np.int16))
    with pytest.raises(ValueError, match=rf"response 0 has routed_experts of {num_tokens} tokens, and there are 5"):
        RolloutGroup(Prompt("p", np.asarray([1, 2, 3])), (response,))


def test_score_zero_is_a_score():
    """Covers OpenRLHF#1219 (score 0.0 treated as missing)."""
    two = group(1, 1, rewards_N=[0.0, 0.0])
    assert two.rewards_N is not None
    assert two.rewards_N.tolist() == [0.0, 0.0]
    assert group(1, 1).rewards_N is None


@given(st.lists(st.integers(0, 3), max_size=5))
def test_select_keeps_rewards_with_their_responses(indices: list[int]):
    chosen = group(2, 0, 5, 1, rewards_N=[10, 11, 12, 13], advantages_N=[-2, -1, 1, 2]).select(indices)
    assert chosen.response_lengths == tuple((2, 0, 5, 1)[index] for index in indices)
    assert chosen.rewards_N is not None and chosen.advantages_N is not None
    assert chosen.rewards_N.tolist() == [10 + index for index in indices]
    assert chosen.advantages_N.tolist() == [(-2, -1, 1, 2)[index] for index in indices]


def test_failed_scores_are_one_for_each_response():
    with pytest.raises(ValueError, match=r"score_failed_N must be \[2\].*\(3,\)"):
        group(1, 2, score_failed_N=np.zeros(3, np.bool_))


def test_select_without_rewards():
    assert group(1, 2).select([1]).rewards_N is None


def test_metadata_by_default_is_empty_and_each_prompts_own():
    first, second = (Prompt("p", np.asarray([1])) for _ in range(2))
    assert first.metadata == {}
    assert first.metadata is not second.metadata


def test_groups_travel_between_processes():
    """Reward workers, Ray and multiprocessing pickle what they are given."""
    response = Response(np.asarray([3]), rollout_logprobs=np.asarray([-0.5], np.float32), support=support([2, 3]))
    sent = RolloutGroup(Prompt("p", np.asarray([1, 2])), (response,), rewards_N=np.asarray([1.0]))
    for received in (pickle.loads(pickle.dumps(sent)), copy.deepcopy(sent)):
        assert received.prompt.id == "p"
        assert received.prompt.token_ids.tolist() == [1, 2]
        (other,) = received.responses
        assert other.rollout_logprobs is not None and other.rollout_logprobs.tolist() == [-0.5]
        assert other.support is not None and other.support.token_ids.tolist() == [2, 3]
        assert received.rewards_N is not None and received.rewards_N.tolist() == [1.0]
