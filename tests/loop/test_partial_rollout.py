"""Steps that draw a part of each response: which groups they begin, take further and train on."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.loop.run_process import kill, start, wait_for
from tests.loop.several_ranks import start_ranks
from tests.loop.tiny_run import VARIANTS, TinyRun, metrics_rows, rollouts, traces
from tests.sampling import sampled

from ratoon.config import Recipe
from ratoon.data import PromptStream
from ratoon.loop.partial_rollout import PartialRollout, roll_out_parts
from ratoon.loop.waiting_groups import NONE_WAITING, WaitingGroup, WaitingGroups
from ratoon.rollout import RolloutConfig
from ratoon.trainer.state_tree import join_state, split_state
from ratoon.types import FinishReason, Prompt, Response, RolloutGroup, SampledSupport
from ratoon.types.sampling import SamplingParams

PARTIAL = VARIANTS["partial rollouts"]


class Engine:
    """Responses of a given length for each prompt id, and step in which it is begun; token i of R is i."""

    def __init__(self, lengths: Mapping[tuple[str, int], tuple[int, ...]]) -> None:
        self.lengths = lengths
        self.policy_version = 0
        self.calls: list[tuple[str | int, int]] = []

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        begun: RolloutGroup | None = None,
        max_new_tokens: int | None = None,
    ) -> RolloutGroup:
        assert max_new_tokens is not None
        self.calls.append((prompt.id, step))
        responses: list[Response] = []
        for index, wanted in enumerate(self.lengths[str(prompt.id), step][:group_size]):
            old = None if begun is None else begun.responses[index]
            if old is not None and not old.can_go_on:
                responses.append(old)
                continue
            num_old = 0 if old is None else old.num_tokens
            R = min(num_old + max_new_tokens, wanted)
            versions = np.full(R, self.policy_version)
            if old is not None and old.policy_versions is not None:
                versions[:num_old] = old.policy_versions
            reason = FinishReason.EOS if wanted == R else FinishReason.BUDGET
            responses.append(Response(np.arange(R), np.zeros(R, np.float32), "t" * R, reason, versions))
        return RolloutGroup(prompt, tuple(responses))

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def close(self) -> None: ...


def stream(num_prompts: int = 5) -> PromptStream:
    return PromptStream([Prompt(f"p{i}", np.array([i + 1])) for i in range(num_prompts)], seed=1, shuffle=True)


def one_step(
    engine: Engine, step: int, waiting: WaitingGroups, prompts: PromptStream, **settings: Any
) -> PartialRollout:
    config = RolloutConfig(**{"group_size": 2, "max_response_tokens": 12, "max_new_tokens_per_step": 4, **settings})
    return asyncio.run(roll_out_parts(step, waiting=waiting, config=config, seed=0, prompts=prompts, engine=engine))


class AnyLengths(dict[tuple[str, int], tuple[int, ...]]):
    """Drawn when first asked for, from a seed."""

    def __init__(self, seed: int, longest: int) -> None:
        super().__init__()
        self._seed, self._longest = seed, longest

    def __missing__(self, key: tuple[str, int]) -> tuple[int, ...]:
        rng = np.random.default_rng([self._seed, key[1], *key[0].encode()])
        # A skewed distribution: most are short.
        self[key] = tuple(int(n) for n in np.minimum(rng.geometric(0.25, 2), self._longest))
        return self[key]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompts_per_step=st.integers(1, 4),
    budget=st.integers(1, 11),
    is_long=st.booleans(),
)
def test_every_group_is_trained_on_once_whole_and_steps_are_full(
    seed: int, prompts_per_step: int, budget: int, is_long: bool
):
    """prime-rl#3313, slime#1781, slime#2278, tinker#822: what waits is bounded, and so is its age in training.

    Over 30 steps on five prompts, epochs apart: what is begun is trained on once or waits; the prompts are the
    stream's, in order; no more than the bound waits; and where every response is of full length, steps are full from
    the first that can be."""
    lengths: Any = AnyLengths(seed, 12)
    if is_long:
        lengths = type("All", (dict,), {"__missing__": lambda _, key: (12, 12)})()
    engine, prompts, waiting = Engine(lengths), stream(), NONE_WAITING
    max_parts = -(-12 // budget)
    taken: list[tuple[int, str]] = []
    trained: list[tuple[int, str]] = []
    for step in range(30):
        engine.policy_version = step
        before = {(begun.step, str(begun.group.prompt.id)) for begun in waiting.groups}
        drawn = one_step(
            engine, step, waiting, prompts, prompts_per_step=prompts_per_step, max_new_tokens_per_step=budget
        )
        waiting = drawn.waiting
        after = {(begun.step, str(begun.group.prompt.id)) for begun in waiting.groups}
        begun_now = {(begun, str(name)) for name, begun in engine.calls if begun == step}
        assert len(begun_now) == drawn.num_begun in (0, prompts_per_step)
        taken += sorted(begun_now)
        engine.calls.clear()
        gone = sorted((before | begun_now) - after)
        assert all(step - begun < 2 * max_parts for begun, _ in gone)
        trained += gone
        assert len(drawn.complete) == len(gone) <= prompts_per_step
        for group in drawn.complete:
            for response in group.responses:
                assert response.finish_reason is FinishReason.EOS
                assert response.policy_versions is not None and (np.diff(response.policy_versions) >= 0).all()
                counts = Counter(response.policy_versions.tolist()).values()
                assert max(counts, default=0) <= budget
        assert len(waiting.groups) < (max_parts + 1) * prompts_per_step
        if len(before) >= (max_parts - 1) * prompts_per_step:
            assert len(drawn.complete) == prompts_per_step
        if is_long:
            assert len(drawn.complete) == (prompts_per_step if step >= max_parts - 1 else 0)
        assert set(waiting.taken_at) == {begun.step for begun in waiting.groups}
    assert len(set(trained)) == len(trained)
    assert {*trained, *((begun.step, str(begun.group.prompt.id)) for begun in waiting.groups)} == set(taken)
    plain = stream()
    assert sorted(name.partition("#")[0] for _, name in taken) == sorted(
        str(prompt.id) for prompt in plain.take(len(taken))
    )


def test_groups_begun_first_are_trained_on_first_and_a_full_store_begins_none():
    lengths = {(f"p{i}", step): (1, 1) for i in range(5) for step in range(9)}
    lengths |= {(f"p{i}", 0): (9, 3) for i in range(5)}
    engine, prompts = Engine(lengths), stream()
    first = one_step(engine, 0, NONE_WAITING, prompts, prompts_per_step=2)
    assert first.complete == () and first.num_begun == 2 and first.num_generated_tokens == 2 * (4 + 3)
    second = one_step(engine, 1, first.waiting, prompts, prompts_per_step=2)
    assert [response.num_tokens for group in second.complete for response in group.responses] == [1] * 4
    third = one_step(engine, 2, second.waiting, prompts, prompts_per_step=2)
    assert [group.response_lengths for group in third.complete] == [(9, 3)] * 2, "begun first, complete now"
    assert third.num_generated_tokens == 2 * 1 + 4 * 1 and third.waiting.num_complete == 2
    fourth = one_step(engine, 3, third.waiting, prompts, prompts_per_step=2)
    assert fourth.num_begun == 0 and len(fourth.complete) == 2 and fourth.waiting.groups == ()
    assert prompts.state().position + 5 * prompts.state().epoch == 6


def test_a_failed_step_changes_nothing_that_waits():
    engine, prompts = Engine({(f"p{i}", 0): (9, 3) for i in range(5)}), stream()
    waiting = one_step(engine, 0, NONE_WAITING, prompts, prompts_per_step=2).waiting
    held = [group.group.response_lengths for group in waiting.groups]
    with pytest.raises(ExceptionGroup):
        one_step(engine, 1, waiting, prompts, prompts_per_step=2)  # the engine knows no lengths of step 1
    assert [group.group.response_lengths for group in waiting.groups] == held == [(4, 3)] * 2


def test_what_waits_comes_back_from_a_checkpoint_as_it_was():
    """Two groups of a prompt that one step took twice, supports, routes, fields that some responses lack, no tokens."""
    prompts = stream(2)
    at = prompts.state()
    kept = SampledSupport.of([np.array([1, 4], np.int32), np.array([2, 3, 9], np.int32)])
    full = Response(
        np.array([1, 2]), np.array([-0.5, -2], np.float32), "ab", FinishReason.BUDGET, np.array([3, 4]), kept,
        np.arange(6, dtype=np.int16).reshape(3, 2, 1),
    )  # fmt: skip
    bare = Response(np.array([7, 8, 9]), None, "", FinishReason.STOP)
    empty = Response(np.array([], int), np.array([], np.float32), "", FinishReason.ABORT, np.array([], int))
    taken = prompts.take(5)
    later = prompts.state()
    seen = Counter(prompt.id for prompt in taken)
    groups = tuple(
        WaitingGroup(2, place, RolloutGroup(taken[place], responses))
        for place, responses in ((1, (full, bare)), (3, (empty, full)), (4, (bare, empty)))
    )
    skeleton, tensors = split_state(WaitingGroups(groups, {2: at}).state())
    state = join_state(json.loads(json.dumps(skeleton)), tensors)
    found = WaitingGroups.restore(state, prompts)
    assert prompts.state() == later, "the stream stays where it stood"
    assert found.taken_at == {2: at} and max(seen.values()) > 1
    names = [str(begun.group.prompt.id) for begun in found.groups]
    assert len(set(names)) == 3, "one prompt's groups are told apart again"
    for mine, other in zip(found.groups, groups, strict=True):
        assert (mine.step, mine.place) == (other.step, other.place)
        assert mine.group.prompt.token_ids.tolist() == other.group.prompt.token_ids.tolist()
        for a, b in zip(mine.group.responses, other.group.responses, strict=True):
            assert (a.finish_reason, a.text, a.token_ids.tolist()) == (b.finish_reason, b.text, b.token_ids.tolist())
            for name in ("rollout_logprobs", "policy_versions", "routed_experts"):
                left, right = getattr(a, name), getattr(b, name)
                assert (left is None) == (right is None) and (left is None or np.array_equal(left, right))
            assert (a.support is None) == (b.support is None)
            if a.support is not None and b.support is not None:
                assert a.support.offsets.tolist() == b.support.offsets.tolist()
                assert a.support.token_ids.tolist() == b.support.token_ids.tolist()


def test_a_recipe_whose_parts_cannot_act_is_refused_by_name():
    with pytest.raises(
        ValidationError, match="max_new_tokens_per_step = 12 does nothing with max_response_tokens = 12"
    ):
        RolloutConfig(max_response_tokens=12, max_new_tokens_per_step=12)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RolloutConfig(max_new_tokens_per_step=0)
    rest = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "data": {"source": "d.jsonl"},
        "reward": {"function": "exact-match"},
        "rollout": {"max_new_tokens_per_step": 3},
    }
    with pytest.raises(ValidationError, match="max_new_tokens_per_step does not go with algorithm"):
        Recipe.model_validate({**rest, "algorithm": {"name": "dapo"}})
    assert Recipe.model_validate({**rest, "algorithm": {"name": "dapo", "dynamic_sampling": False}})


def test_supports_have_room_for_every_group_that_may_be_held():
    plain = RolloutConfig(max_response_tokens=12)
    assert (plain.max_parts, plain.max_support_ids) == (1, (1 << 28) // 64)
    parts = RolloutConfig(max_response_tokens=12, max_new_tokens_per_step=5)
    assert (parts.max_parts, parts.max_support_ids) == (3, (1 << 28) // (4 * 64))


def test_a_run_says_what_it_waits_for_and_how_old_its_tokens_are(tiny: TinyRun):
    outcome = tiny.train("--rollout.max_new_tokens_per_step=2", "--rollout.top_k=5")
    assert outcome.status == 0
    rows = metrics_rows(tiny.run_dir, "train")
    assert [row["num_groups"] for row in rows] == [0, 0, 2, 2, 2, 2]
    assert [row["num_waiting_groups"] for row in rows] == [2, 4, 4, 4, 4, 4]
    assert [row["num_lost_responses"] for row in rows] == [0] * 6
    for name in ("reward_mean", "response_tokens_mean", "staleness_mean"):
        assert [name in row for row in rows] == [False] * 2 + [True] * 4, "a mean over nothing is no 0"
    assert rows[2]["staleness_max"] == 2 and 0 < rows[2]["staleness_mean"] < 2
    said = (tiny.run_dir / "run.log").read_text()
    assert "no group is complete yet: all 2 go on in the next step" in said
    assert "drawn up to 2 policy versions before" in said and "algorithm.mismatch_correction" in said
    trained = [row for rows in rollouts(tiny.run_dir).values() for row in rows]
    assert {row["finish_reason"] for row in trained} <= {"eos", "length"}
    assert all(list(row["policy_versions"]) == sorted(row["policy_versions"]) for row in trained)
    late = [row for row in trained if len(row["policy_versions"]) > 4]
    assert late and all(len(set(row["policy_versions"])) == 3 for row in late)


@pytest.mark.parametrize("num_steps", sampled(5, 3))
def test_a_run_killed_between_parts_goes_on_to_bitwise_the_same_end(
    tiny: TinyRun, undisturbed_of: Any, forks: ForkServerContext, num_steps: int
):
    process = start(forks, tiny, *PARTIAL)
    wait_for(lambda: (tiny.run_dir / "rollouts" / f"step-{num_steps:06d}.parquet").exists(), process)
    assert kill(process), (tiny.folder / "output").read_text()
    outcome = tiny.train(*PARTIAL)
    assert (outcome.status, outcome.err) == (0, "")
    assert traces(tiny.run_dir) == traces(undisturbed_of("partial rollouts"))


def test_a_run_made_longer_goes_on_with_what_waits(tiny: TinyRun, undisturbed_of: Any):
    """Stopped after step 2, when nothing is trained on yet and four groups wait."""
    assert tiny.train(*PARTIAL, "--trainer.num_steps=2").status == 0
    assert tiny.train(*PARTIAL).status == 0
    whole: Path = undisturbed_of("partial rollouts")
    assert rollouts(tiny.run_dir) == rollouts(whole)


@pytest.mark.full
def test_two_ranks_train_on_what_one_does(tiny: TinyRun, undisturbed_of: Any, forks: ForkServerContext):
    """Killed after the first checkpoint with waiting groups and resumed, both with two ranks."""
    ranks = start_ranks(forks, tiny, *PARTIAL)
    wait_for(lambda: (tiny.run_dir / "rollouts" / "step-000003.parquet").exists(), ranks.processes[0])
    for process in ranks.processes:
        kill(process)
    assert start_ranks(forks, tiny, *PARTIAL).join() == (0, 0)
    mine, whole = rollouts(tiny.run_dir), rollouts(undisturbed_of("partial rollouts"))
    assert mine.keys() == whole.keys()
    for name in mine:
        for a, b in zip(mine[name], whole[name], strict=True):
            for column in ("prompt_id", "token_ids", "policy_versions", "finish_reason"):
                assert a[column] == b[column], (name, column)
