"""Rollouts as Parquet: what was drawn, one row a response."""

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ratoon.trainer.rollout_table import ROLLOUT_SCHEMA, rollout_file, write_rollouts
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup


def prompt(name: str | int, token_ids: list[int], text: str = "", answer: str | None = None) -> Prompt:
    return Prompt(name, np.array(token_ids), text, answer)


def response(
    token_ids: list[int],
    logprobs: list[float] | None = None,
    *,
    text: str = "",
    finish_reason: FinishReason = FinishReason.EOS,
    versions: list[int] | None = None,
) -> Response:
    return Response(
        np.array(token_ids, np.int64),
        None if logprobs is None else np.array(logprobs, np.float32),
        text,
        finish_reason,
        None if versions is None else np.array(versions, np.int64),
    )


def two_groups() -> list[RolloutGroup]:
    """Three responses, one of them empty; none; and one unscored, from an engine that reports nothing."""
    first = RolloutGroup(
        prompt("sum-7", [5, 6, 7], text="2+2=", answer="4"),
        (
            response([9, 2], [-0.5, -0.25], text="4", versions=[3, 4]),
            response([], [], finish_reason=FinishReason.ABORT, versions=[]),
            response([2**31 - 1] * 3, [-1.0, -2.0, -np.inf], text="ε [b] \n", finish_reason=FinishReason.LENGTH),
        ),
        rewards_N=np.array([1.0, 0.0, 0.1]),
        advantages_N=np.array([1.2, -1.1, -0.1]),
        score_failed_N=np.array([False, True, False]),
        reward_components={"only": np.array([1.0, 0.0, 0.1])},
    )
    second = RolloutGroup(prompt(12, [1], text="\ud83d lone"), (response([4], finish_reason=FinishReason.STOP),))
    return [first, RolloutGroup(prompt("nobody", [1]), ()), second]


def test_each_response_is_one_row(tmp_path: Path):
    path = write_rollouts(tmp_path / "rollouts", 3, two_groups())
    assert path == tmp_path / "rollouts" / "step-000003.parquet" == rollout_file(tmp_path / "rollouts", 3)
    table = pq.read_table(path)
    assert table.schema.equals(ROLLOUT_SCHEMA)
    assert table.to_pylist() == [
        {
            "step": 3,
            "group_index": 0,
            "response_index": 0,
            "prompt_id": "sum-7",
            "prompt": "2+2=",
            "answer": "4",
            "response": "4",
            "reward": 1.0,
            "score_failed": False,
            "advantage": 1.2,
            "finish_reason": "eos",
            "num_prompt_tokens": 3,
            "num_response_tokens": 2,
            "token_ids": [9, 2],
            "rollout_logprobs": [-0.5, -0.25],
            "policy_version": 3,
            "policy_versions": [3, 4],
        },
        {
            "step": 3,
            "group_index": 0,
            "response_index": 1,
            "prompt_id": "sum-7",
            "prompt": "2+2=",
            "answer": "4",
            "response": "",
            "reward": 0.0,
            "score_failed": True,
            "advantage": -1.1,
            "finish_reason": "abort",
            "num_prompt_tokens": 3,
            "num_response_tokens": 0,
            "token_ids": [],
            "rollout_logprobs": [],
            "policy_version": None,
            "policy_versions": [],
        },
        {
            "step": 3,
            "group_index": 0,
            "response_index": 2,
            "prompt_id": "sum-7",
            "prompt": "2+2=",
            "answer": "4",
            "response": "ε [b] \n",
            "reward": 0.1,
            "score_failed": False,
            "advantage": -0.1,
            "finish_reason": "length",
            "num_prompt_tokens": 3,
            "num_response_tokens": 3,
            "token_ids": [2**31 - 1] * 3,
            "rollout_logprobs": [-1.0, -2.0, -np.inf],
            "policy_version": None,
            "policy_versions": None,
        },
        {
            "step": 3,
            "group_index": 2,
            "response_index": 0,
            "prompt_id": "12",
            "prompt": "? lone",
            "answer": None,
            "response": "",
            "reward": None,
            "score_failed": None,
            "advantage": None,
            "finish_reason": "stop",
            "num_prompt_tokens": 1,
            "num_response_tokens": 1,
            "token_ids": [4],
            "rollout_logprobs": None,
            "policy_version": None,
            "policy_versions": None,
        },
    ]


def test_several_components_have_a_column_each(tmp_path: Path):
    """Zeros by failure, by truth, and by a weight can be told apart."""
    scored = RolloutGroup(
        prompt("a", [1]),
        (response([2]), response([3])),
        rewards_N=np.array([0.0, 0.0]),
        reward_components={"right": np.array([0.0, -0.5]), "failed": np.array([0.0, 1.0])},
        score_failed_N=np.array([True, False]),
    )
    nobody = scored.select([])
    unscored = RolloutGroup(prompt("b", [1]), (response([4]),))
    table = pq.read_table(write_rollouts(tmp_path, 1, [nobody, unscored, scored.select([1, 0])]))
    assert table.schema.names == [*ROLLOUT_SCHEMA.names, "reward_right", "reward_failed"]
    assert table["reward_right"].to_pylist() == [None, -0.5, 0.0]
    assert table["reward_failed"].to_pylist() == [None, 1.0, 0.0]
    assert table["score_failed"].to_pylist() == [None, False, True]


def test_logprobs_keep_their_bits(tmp_path: Path):
    logprobs = -np.random.default_rng(0).random(500, np.float32)
    group = RolloutGroup(prompt(0, [1]), (Response(np.arange(500), logprobs),))
    read = pq.read_table(write_rollouts(tmp_path, 1, [group]))["rollout_logprobs"].combine_chunks()
    assert np.array_equal(read.flatten().to_numpy(), logprobs)


def test_a_step_taken_again_replaces_its_file(tmp_path: Path):
    write_rollouts(tmp_path, 1, two_groups())
    path = write_rollouts(tmp_path, 1, two_groups()[2:])
    assert pq.read_table(path).num_rows == 1
    assert os.listdir(tmp_path) == ["step-000001.parquet"]


def test_a_step_without_responses_is_an_empty_table_with_columns(tmp_path: Path):
    table = pq.read_table(write_rollouts(tmp_path, 1, []))
    assert table.num_rows == 0 and table.schema.equals(ROLLOUT_SCHEMA)


def test_steps_are_read_together(tmp_path: Path):
    for step in (1, 2):
        write_rollouts(tmp_path, step, two_groups())
    assert pq.read_table(tmp_path)["step"].to_pylist() == [1] * 4 + [2] * 4


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_rollouts(tmp_path, 1, two_groups())
    before = path.read_bytes()

    def half_write(table: object, where: Path, **options: str) -> None:
        where.write_bytes(before[:100])
        raise OSError("disk")

    monkeypatch.setattr(pq, "write_table", half_write)
    with pytest.raises(OSError, match="disk"):
        write_rollouts(tmp_path, 1, two_groups()[:1])
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
