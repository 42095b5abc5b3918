"""A batch over the fake runner, what it has been given, and what must hold at its end."""

# Shape letters: P prompt tokens, R response tokens, N responses, V vocabulary.

from dataclasses import dataclass, field

import numpy as np
import torch
from tests.rollout.paged.fake import VOCAB, FakeRunner, logits_after
from transformers import PreTrainedTokenizerFast

from ratoon.rollout.drafts import Ending, GroupDraft, PolicyStamp, ResponseDraft
from ratoon.rollout.draws import sample_tokens, uniform_draws
from ratoon.rollout.engines.paged.batch import PagedBatch
from ratoon.rollout.errors import RolloutError
from ratoon.rollout.stopping import StopStrings
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams

EOS = 0


@dataclass
class Drill:
    """A batch over a fake runner, and what it has been given."""

    tokenizer: PreTrainedTokenizerFast
    max_concurrent_responses: int = 4
    cache_tokens: int | None = None
    block_tokens: int = 3
    prefill_tokens: int = 7
    restarts: bool = False
    steps_together: int = 1
    stamp: PolicyStamp = field(default_factory=PolicyStamp)
    groups: list[GroupDraft] = field(default_factory=list)
    finished: list[GroupDraft] = field(default_factory=list)
    failed: list[GroupDraft] = field(default_factory=list)
    withdrawn: list[GroupDraft] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.block_tokens, self.prefill_tokens, self.stamp, self.restarts, self.steps_together)
        self.batch = PagedBatch(
            self.runner,
            self.max_concurrent_responses,
            self.cache_tokens,
            restarts=self.restarts,
            prefill_tokens=self.prefill_tokens,
        )

    def add(
        self,
        num_prompt_tokens: int,
        group_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
    ) -> GroupDraft:
        # Every third prompt has the id and the tokens of another one.
        number = len(self.groups) // 3 * 3 if len(self.groups) % 3 == 1 else len(self.groups)
        token_ids = np.random.default_rng(number).integers(1, VOCAB, num_prompt_tokens)
        prompt = Prompt(f"p{number}", token_ids)
        sampling = SamplingParams(temperature=temperature, max_response_tokens=max_tokens, seed=5)
        return self._add(prompt, group_size, sampling, max_new_tokens, begun=None)

    def go_on(self, before: GroupDraft, max_new_tokens: int | None = None) -> GroupDraft | None:
        """A call that takes an ended group further, as the engine makes it; None where nothing is left to draw."""
        begun = before.group(self.tokenizer)
        if not any(response.can_go_on for response in begun.responses):
            return None
        sampling = SamplingParams(
            temperature=before.drafts[0].temperature, max_response_tokens=before.max_response_tokens, seed=5
        )
        return self._add(before.prompt, len(before.drafts), sampling, max_new_tokens, begun=begun)

    def _add(
        self,
        prompt: Prompt,
        group_size: int,
        sampling: SamplingParams,
        max_new_tokens: int | None,
        begun: RolloutGroup | None,
    ) -> GroupDraft:
        max_tokens = sampling.max_response_tokens
        group = GroupDraft.start(
            prompt,
            group_size,
            sampling,
            step=0,
            ending=Ending(frozenset([EOS]), StopStrings((), self.tokenizer), max_tokens, max_new_tokens),
            stamp=self.stamp,
            max_support_ids=1_000,
            begun=begun,
        )
        self.batch.check_fits(group.prompt.id, prompt.num_tokens, max_tokens)
        self.groups.append(group)
        self.batch.add(group)
        return group

    def step(self) -> None:
        report = self.batch.step()
        assert self.batch.num_running <= self.max_concurrent_responses
        self.finished += report.finished
        self.failed += report.failed
        if report.failed:
            assert isinstance(report.error, RolloutError) and "MemoryError: asked to break" in str(report.error)
        else:
            assert report.made_progress or len(self.open) == 0
        for family in self.batch._families.values():
            # A row of the vocabulary's size is kept only while a first token is drawn from it.
            assert family.num_unstarted > 0 or family.prompt is None or family.prompt.logits_V is None

    def update(self) -> None:
        self.stamp.version += 1
        self.batch.weights_changed()

    def withdraw(self, groups: list[GroupDraft]) -> None:
        self.withdrawn += [group for group in groups if group in self.open]
        self.batch.withdraw(groups)

    @property
    def open(self) -> list[GroupDraft]:
        ended = {id(group) for group in (*self.finished, *self.failed, *self.withdrawn)}
        return [group for group in self.groups if id(group) not in ended]

    def run_to_the_end(self) -> None:
        # Each step ends at least a piece of a prompt or a token of the oldest response.
        most = sum(len(g.drafts) * (g.prompt.num_tokens + g.max_response_tokens) ** 2 for g in self.open)
        for _ in range(most):
            if not self.open:
                break
            self.step()
        assert not self.open, "the schedule does not end"

    def check_ends(self) -> None:
        """Each group ended once, no block is held, and every token is what its response alone would draw."""
        ends = [id(group) for group in (*self.finished, *self.failed, *self.withdrawn)]
        assert sorted(ends) == sorted({id(group) for group in self.groups})
        assert self.batch.num_running == 0 and self.batch.num_free_blocks == self.batch.num_blocks
        for group in self.groups:
            for draft in group.drafts:
                assert_drawn_alone(group, draft)
        assert all(draft.finish_reason for group in self.finished for draft in group.drafts)
        self.batch.forget_cache()
        assert self.batch.num_blocks == 0


def assert_drawn_alone(group: GroupDraft, draft: ResponseDraft) -> None:
    if draft.ended is not None:
        assert not draft.token_ids, "a response that had ended was given tokens"
        return
    R = len(draft.token_ids)
    assert group.max_response_tokens >= R and (np.diff(draft.versions) >= 0).all()
    assert len(draft.versions) == len(draft.logprobs) == R
    if draft.finish_reason is FinishReason.EOS:
        assert draft.token_ids[-1] == EOS
    elif draft.finish_reason is FinishReason.LENGTH:
        assert group.max_response_tokens == R
    elif draft.finish_reason is FinishReason.BUDGET:
        assert R - draft.num_begun == draft.ending.max_new_tokens and group.max_response_tokens > R
    assert EOS not in draft.token_ids[:-1]
    if R == 0:
        return
    tokens = np.concatenate([group.prompt.token_ids, draft.token_ids])
    logits_RV = np.stack([logits_after(tokens[: group.prompt.num_tokens + index]) for index in range(R)])
    uniform_R = uniform_draws(np.full(R, draft.key, np.uint64), np.arange(R))
    temperature_R = torch.full((R,), draft.temperature, dtype=torch.float64)
    token_R, logprob_R = sample_tokens(torch.from_numpy(logits_RV), temperature_R, torch.from_numpy(uniform_R))
    assert draft.token_ids == token_R.tolist()
    np.testing.assert_allclose(draft.logprobs, logprob_R.numpy(), rtol=0, atol=1e-6)
