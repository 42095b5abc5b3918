"""Groups drawn in several calls, each with a budget of tokens."""

import asyncio
from collections.abc import Sequence

from ratoon.rollout.engine import RolloutEngine
from ratoon.types import FinishReason, Prompt, RolloutGroup, SamplingParams


async def in_parts(
    engine: RolloutEngine, prompt: Prompt, group_size: int, sampling: SamplingParams, budgets: Sequence[int], step: int
) -> RolloutGroup:
    """One call after the other until every response has ended; the last budget holds for all further calls."""
    group: RolloutGroup | None = None
    num_calls = 0
    while group is None or any(response.can_go_on for response in group.responses):
        budget = budgets[min(num_calls, len(budgets) - 1)]
        before = group
        group = await engine.generate(
            prompt, group_size=group_size, sampling=sampling, step=step, begun=before, max_new_tokens=budget
        )
        num_calls += 1
        assert_within(before, group, budget)
    return group


def assert_within(before: RolloutGroup | None, after: RolloutGroup, budget: int) -> None:
    """What a call with a budget may have done to a group: ended responses are the same objects, others grew by the
    budget or ended, and nothing that was drawn has changed."""
    for index, response in enumerate(after.responses):
        old = None if before is None else before.responses[index]
        if old is not None and not old.can_go_on:
            assert response is old
            continue
        num_old = 0 if old is None else old.num_tokens
        assert 1 <= response.num_tokens - num_old <= budget
        assert response.finish_reason is not FinishReason.BUDGET or response.num_tokens - num_old == budget
        assert old is None or response.token_ids[:num_old].tolist() == old.token_ids.tolist()


def draw_in_parts(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingParams,
    budgets: Sequence[int],
    step: int = 0,
) -> list[RolloutGroup]:
    """All prompts at once; each goes on as soon as its own responses have their budget."""

    async def run() -> list[RolloutGroup]:
        calls = [in_parts(engine, prompt, group_size, sampling, budgets, step) for prompt in prompts]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())
