"""What is asked of vLLM for each response, and what becomes of what it draws. No vLLM is needed."""

import math

import numpy as np
import pytest
from tests.rollout.tiny import EOS, byte_tokenizer
from tests.rollout.vllm.fake_core import WORD, FakeCore

from ratoon.rollout.drafts import Ending, GroupDraft, PolicyStamp
from ratoon.rollout.engines.stepping import StepReport
from ratoon.rollout.engines.vllm.batch import VllmBatch
from ratoon.rollout.errors import RolloutError
from ratoon.rollout.stopping import StopStrings, decode
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams, UserError

TOKENIZER = byte_tokenizer()


def group(
    name: str = "p",
    *,
    size: int = 2,
    most: int = 6,
    stop: tuple[str, ...] = (),
    eos: int = EOS,
    stamp: PolicyStamp | None = None,
    begun: RolloutGroup | None = None,
    max_new_tokens: int | None = None,
) -> GroupDraft:
    sampling = SamplingParams(max_response_tokens=most, stop=stop, seed=3)
    ending = Ending(frozenset({eos}), StopStrings(stop, TOKENIZER), most, max_new_tokens)
    return GroupDraft.start(
        Prompt(name, np.array([1, 2, 3])), size, sampling, 0,
        ending=ending, stamp=stamp or PolicyStamp(), max_support_ids=10, begun=begun,
    )  # fmt: skip


def run(batch: VllmBatch, most: int = 50) -> list[StepReport]:
    reports = []
    for _ in range(most):
        reports.append(batch.step())
        if batch.num_running == 0:
            return reports
    raise AssertionError("responses did not end")


def test_each_response_is_a_request_with_draws_of_its_own():
    core = FakeCore()
    batch = VllmBatch(core)
    batch.add(group(size=3))
    asked = list(core.requests.values())
    assert [request["token_ids"] for request in asked] == [[1, 2, 3]] * 3
    assert len({request["seed"] for request in asked}) == 3
    assert all(request["max_tokens"] == 6 and request["eos_ids"] == [EOS] for request in asked)
    again = FakeCore()
    VllmBatch(again).add(group(size=3))
    assert [r["seed"] for r in again.requests.values()] == [r["seed"] for r in asked], "the same run draws the same"


def test_a_group_is_handed_out_once_when_its_last_response_has_ended():
    core, stamp = FakeCore(), PolicyStamp(4)
    batch, made = VllmBatch(core), group(stamp=stamp)
    batch.add(made)
    batch.step()
    stamp.version = 5
    finished = [each for report in run(batch) for each in report.finished]
    assert finished == [made] and not core.open
    for response in made.group(TOKENIZER).responses:
        assert response.token_ids.tolist() == [*WORD, *WORD[:2]]
        assert response.finish_reason is FinishReason.LENGTH
        assert response.policy_versions is not None and response.policy_versions.tolist() == [4, 5, 5, 5, 5, 5]


def test_a_stop_string_ends_the_request_in_vllm_too():
    core = FakeCore()
    batch = VllmBatch(core)
    made = group(stop=(decode(TOKENIZER, WORD[:2]),))
    batch.add(made)
    run(batch)
    assert [response.finish_reason for response in made.group(TOKENIZER).responses] == [FinishReason.STOP] * 2
    assert sorted(core.aborted) == sorted(core.requests) and not core.open


def test_a_response_goes_on_behind_its_tokens_with_what_is_left_of_its_budget():
    """verl#7207: a response that was gone on with exceeded its token budget."""
    first = group(size=1, max_new_tokens=2)
    batch = VllmBatch(FakeCore())
    batch.add(first)
    run(batch)
    begun = first.group(TOKENIZER)
    assert begun.responses[0].finish_reason is FinishReason.BUDGET
    core = FakeCore()
    batch = VllmBatch(core)
    second = group(size=1, begun=begun, stamp=PolicyStamp(9))
    batch.add(second)
    (asked,) = core.requests.values()
    assert asked["token_ids"] == [1, 2, 3, *WORD[:2]] and asked["max_tokens"] == 4
    run(batch)
    (response,) = second.group(TOKENIZER).responses
    assert response.num_tokens == 6 and response.finish_reason is FinishReason.LENGTH
    assert response.policy_versions is not None and response.policy_versions.tolist() == [0, 0, 9, 9, 9, 9]
    fresh = FakeCore()
    VllmBatch(fresh).add(group(size=1))
    assert asked["seed"] != next(iter(fresh.requests.values()))["seed"], "not the noise of its first tokens again"


def test_a_failing_core_ends_every_call_by_name_and_is_left_alone():
    core = FakeCore(error=ValueError("the core is gone"))
    batch = VllmBatch(core)
    batch.add(group("a"))
    batch.add(group("b"))
    report = batch.step()
    assert len(report.failed) == 2 and "the core is gone" in str(report.error) and batch.num_running == 0
    batch.add(group("c"))
    later = batch.step()
    assert len(later.failed) == 1 and "the core is gone" in str(later.error)
    assert core.num_steps == 1, "vLLM is not stepped after a failure"


def test_a_core_without_work_does_not_keep_anyone_waiting():
    """verl#7155: one lost prompt id, and sampling waits forever."""
    core = FakeCore()
    batch = VllmBatch(core)
    batch.add(group())
    core.open.clear()
    report = batch.step()
    assert len(report.failed) == 1 and "2 responses have not ended" in str(report.error)


@pytest.mark.parametrize(
    ("core", "complaint"),
    [(FakeCore(ends_early=True), "though neither its budget nor"), (FakeCore(logprob=math.nan), "log-prob nan")],
)
def test_what_vllm_may_not_do_fails_by_name(core: FakeCore, complaint: str):
    batch = VllmBatch(core)
    batch.add(group())
    report = batch.step()
    assert isinstance(report.error, RolloutError) and complaint in str(report.error) and not core.open


def test_withdrawn_groups_are_forgotten():
    core = FakeCore()
    batch, gone, kept = VllmBatch(core), group("gone"), group("kept")
    batch.add(gone)
    batch.add(kept)
    batch.step()
    batch.withdraw([gone, group("stranger")])
    assert [each for report in run(batch) for each in report.finished] == [kept]
    assert gone.num_tokens == 2, "an abort hands these out"


def test_reused_prompt_tokens_are_counted_once_a_request():
    batch = VllmBatch(FakeCore())
    batch.add(group(size=4))
    run(batch)
    assert (batch.num_reused_tokens, batch.num_prompt_tokens) == (8, 12)


def test_a_prompt_over_the_length_is_refused():
    with pytest.raises(UserError, match=r"'p' has 60 tokens; .* 65, over rollout\.vllm\.max_model_len=64"):
        VllmBatch(FakeCore()).check_fits("p", 60, 5)
    VllmBatch(FakeCore()).check_fits("p", 60, 4)
