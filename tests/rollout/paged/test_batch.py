"""Who runs when, and what a pass computes, over the fake runner."""

import numpy as np
import pytest
from tests.rollout.paged.drill import Drill
from tests.rollout.paged.fake import FakeRunner
from transformers import PreTrainedTokenizerFast

from ratoon.rollout.drafts import GroupDraft
from ratoon.rollout.engines.paged.runner import DecodeRows
from ratoon.types import UserError


def num_tokens(group: GroupDraft) -> list[int]:
    return [len(draft.token_ids) for draft in group.drafts]


def whole_length(drill: Drill, num_prompt_tokens: int, group_size: int, max_tokens: int) -> GroupDraft:
    """A group of greedy responses, all of the same length."""
    for _ in range(50):
        group = drill.add(num_prompt_tokens, group_size, max_tokens, temperature=0.0)
        alone = Drill(drill.tokenizer, cache_tokens=1_000)
        alone.groups = [*drill.groups[:-1]]
        twin = alone.add(num_prompt_tokens, 1, max_tokens, temperature=0.0)
        while not twin.is_complete:
            alone.step()
        if num_tokens(twin) == [max_tokens]:
            return group
        drill.withdraw([group])
    raise AssertionError("every prompt of the fake ends early")


def test_a_prompt_is_computed_once_for_its_group(tokenizer: PreTrainedTokenizerFast):
    """Also where its responses come one after the other through fewer slots."""
    for num_slots in (1, 3, 20):
        drill = Drill(tokenizer, max_concurrent_responses=num_slots)
        drill.add(20, 9, 6)
        drill.add(13, 4, 6)
        drill.run_to_the_end()
        assert drill.runner.num_prefilled == 33
        drill.check_ends()


def test_the_cache_holds_a_prompt_once(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=8, cache_tokens=300, block_tokens=3, prefill_tokens=100)
    group = whole_length(drill, 30, 8, 4)
    drill.step()
    assert num_tokens(group) == [2] * 8
    # Ten blocks of the prompt, and one for each response.
    assert drill.batch.num_blocks - drill.batch.num_free_blocks == 10 + 8


def test_a_long_prompt_keeps_nobody_waiting(tokenizer: PreTrainedTokenizerFast):
    """Running responses get a token in every step while a prompt of 70 tokens is read in ten pieces."""
    drill = Drill(tokenizer, max_concurrent_responses=6, cache_tokens=600, prefill_tokens=7)
    first = whole_length(drill, 5, 3, 30)
    drill.step()
    second = drill.add(70, 2, 3)
    for _ in range(9):
        before = num_tokens(first)
        drill.step()
        assert num_tokens(first) == [number + 1 for number in before]
    assert num_tokens(second) == [0, 0]
    drill.step()
    # The first one from the prompt, and one decoded.
    assert num_tokens(second) == [2, 2] or second.drafts[0].finish_reason


def test_slots_go_first_come_first_served(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=2, cache_tokens=60, prefill_tokens=60)
    groups = [drill.add(4, 3, 5), drill.add(4, 1, 5), drill.add(4, 2, 5)]
    began: list[tuple[int, int]] = []
    while drill.open:
        drill.step()
        for number, group in enumerate(groups):
            for index, draft in enumerate(group.drafts):
                if draft.token_ids and (number, index) not in began:
                    began.append((number, index))
    assert began == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


def test_the_youngest_gives_way_and_goes_on_where_it_was(tokenizer: PreTrainedTokenizerFast):
    """Room for the prompt, one whole response and a half: the older one never waits, the younger computes its keys
    again, and both draw what they would have drawn."""
    drill = Drill(tokenizer, cache_tokens=3 * 6, block_tokens=3, prefill_tokens=50)
    group = whole_length(drill, 6, 2, 10)
    old, young = group.drafts
    kept = 0
    while not old.finish_reason:
        before = len(old.token_ids)
        drill.step()
        assert len(old.token_ids) >= before + 1
        assert len(young.token_ids) >= kept
        kept = len(young.token_ids)
    assert 0 < kept < 10
    drill.run_to_the_end()
    assert num_tokens(group) == [10, 10]
    # The prompt once, and the younger's tokens but the last of them again.
    assert drill.runner.num_prefilled == 6 + kept - 1
    drill.check_ends()


def test_new_weights_compute_prompts_again_for_those_that_have_not_begun(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=2, prefill_tokens=50)
    group = whole_length(drill, 12, 4, 5)
    drill.step()
    drill.update()
    drill.run_to_the_end()
    assert drill.runner.num_prefilled == 12 + 12
    assert [draft.versions for draft in group.drafts] == [[0, 0, 1, 1, 1]] * 2 + [[1] * 5] * 2
    drill.check_ends()


def test_a_response_that_reads_an_old_prompt_takes_the_place_of_the_new_one(tokenizer: PreTrainedTokenizerFast):
    """Room for one prompt and one whole response: the second response computed the prompt anew under new weights, gave
    way, and waits; its prompt must not keep the first from its last block."""
    drill = Drill(tokenizer, max_concurrent_responses=2, cache_tokens=3 * 5, block_tokens=3, prefill_tokens=50)
    whole_length(drill, 3, 1, 3)
    group = whole_length(drill, 3, 2, 12)
    drill.step()
    drill.update()
    drill.run_to_the_end()
    assert num_tokens(group) == [12, 12]
    assert [draft.versions[0] for draft in group.drafts] == [0, 1], "the second begins after the update"
    drill.check_ends()


def test_a_batch_that_restarts_computes_all_keys_again(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=3, prefill_tokens=50, restarts=True)
    group = whole_length(drill, 12, 3, 6)
    drill.step()
    drill.update()
    drill.run_to_the_end()
    # The prompt twice, and of two tokens each response had drawn, the first.
    assert drill.runner.num_prefilled == 12 + 12 + 3
    assert [draft.versions for draft in group.drafts] == [[0, 0, 1, 1, 1, 1]] * 3
    drill.check_ends()


def test_a_budget_of_one_needs_no_block_and_no_decode(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: FakeRunner, rows: DecodeRows) -> None:
        raise AssertionError("nothing is left to decode")

    monkeypatch.setattr(FakeRunner, "decode", refuse)
    drill = Drill(tokenizer, max_concurrent_responses=4, cache_tokens=6, block_tokens=3, prefill_tokens=6)
    group = drill.add(6, 4, 1)
    drill.step()
    assert group.is_complete and drill.finished == [group]
    drill.check_ends()


def test_what_can_never_fit_is_refused_before_it_waits(tokenizer: PreTrainedTokenizerFast):
    """Four blocks: one more token of prompt or response needs a fifth. The largest that is accepted does run."""
    drill = Drill(tokenizer, cache_tokens=12, block_tokens=3)
    for num_prompt_tokens, max_tokens in ((10, 2), (7, 5), (6, 8), (12, 2)):
        with pytest.raises(UserError, match=r"needs 15 cache tokens in blocks of 3, over rollout.cache_tokens=12"):
            drill.add(num_prompt_tokens, 1, max_tokens)
    for num_prompt_tokens, max_tokens in ((9, 4), (6, 7), (3, 10), (12, 1)):
        drill.add(num_prompt_tokens, 3, max_tokens)
    drill.run_to_the_end()
    drill.check_ends()


def test_withdrawing_frees_at_once_and_nothing_else(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=5, cache_tokens=300, prefill_tokens=50)
    gone, stays = whole_length(drill, 7, 3, 9), whole_length(drill, 8, 2, 9)
    waits = drill.add(5, 2, 9)
    drill.step()
    drill.step()
    before = num_tokens(gone)
    drill.withdraw([gone, waits])
    assert drill.batch.num_running == 2
    # Three blocks of the prompt that stays, and one of each response.
    assert drill.batch.num_blocks - drill.batch.num_free_blocks == 3 + 2
    drill.withdraw([gone])
    drill.run_to_the_end()
    assert num_tokens(gone) == before and num_tokens(waits) == [0, 0] and num_tokens(stays) == [9, 9]
    drill.check_ends()


def test_a_failed_pass_ends_those_that_ran(tokenizer: PreTrainedTokenizerFast):
    """Those that wait go on with a cache of their own."""
    drill = Drill(tokenizer, max_concurrent_responses=2, prefill_tokens=50)
    ran, waited = whole_length(drill, 5, 2, 9), drill.add(5, 2, 9)
    drill.step()
    drill.runner.is_broken = True
    drill.step()
    assert drill.failed == [ran]
    drill.run_to_the_end()
    assert drill.finished == [waited]
    drill.check_ends()


def test_a_growing_cache_is_built_few_times(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
    """One group after the other while others run: it at least doubles, up to what all slots can fill."""
    sizes: list[int] = []
    resize = FakeRunner.resize

    def note(self: FakeRunner, num_blocks: int) -> None:
        sizes.append(num_blocks)
        resize(self, num_blocks)

    monkeypatch.setattr(FakeRunner, "resize", note)
    drill = Drill(tokenizer, max_concurrent_responses=32, prefill_tokens=500)
    for _ in range(16):
        drill.add(6, 2, 13)
        drill.step()
    built = np.array([size for size in sizes if size])
    assert 1 < built.size <= 5 and (np.diff(built) > 0).all()
    # Four blocks a response, two blocks of a prompt for each two of them, and a prompt more.
    assert built[-1] == 32 * 5 + 2
    drill.run_to_the_end()
    drill.check_ends()


def test_who_gave_way_goes_before_those_that_wait(tokenizer: PreTrainedTokenizerFast):
    drill = Drill(tokenizer, max_concurrent_responses=2, cache_tokens=3 * 6, block_tokens=3, prefill_tokens=50)
    old, young = whole_length(drill, 6, 2, 10).drafts
    late = drill.add(6, 1, 10).drafts[0]
    kept = 0
    while not old.finish_reason:
        kept = len(young.token_ids)
        drill.step()
    assert 0 < kept < 10
    while not late.token_ids:
        drill.step()
    assert len(young.token_ids) > kept
    drill.run_to_the_end()
    drill.check_ends()
