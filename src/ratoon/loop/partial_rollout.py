"""Steps that draw a part of each response: what is not complete goes on in the next one.

Kimi k1.5's partial rollouts (arXiv 2501.12599, §2.6.2). Each step begins `prompts_per_step` groups and trains on as
many complete ones, those begun first; the others wait. What a step lacks stays in flight, so that later steps have more
to choose from: with `(max_parts - 1) * prompts_per_step` groups in flight, at the latest, every step is full, because
no response takes more than `max_parts` steps. A step that finds as many complete groups waiting as it trains on begins
none: where responses have become short, what is trained on would be old for nothing. So fewer than
`(max_parts + 1) * prompts_per_step` groups are ever held.
"""

from dataclasses import dataclass, replace

from ratoon.data import PromptStream
from ratoon.distributed import DataParallel
from ratoon.loop.repeats import tell_apart
from ratoon.loop.stages import GroupCall, generate_calls
from ratoon.loop.waiting_groups import WaitingGroup, WaitingGroups
from ratoon.rollout import RolloutConfig, RolloutEngine
from ratoon.types.rollouts import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRollout:
    """What one step drew, and what it leaves to the next."""

    complete: tuple[RolloutGroup, ...]
    """To train on: `prompts_per_step` of them, or all there are; not scored yet."""

    waiting: WaitingGroups
    num_begun: int
    """Groups that the step began."""

    num_generated_tokens: int
    """Drawn in this step, whichever step trains on them."""


async def roll_out_parts(
    step: int,
    *,
    waiting: WaitingGroups,
    config: RolloutConfig,
    seed: int,
    prompts: PromptStream,
    engine: RolloutEngine,
    ranks: DataParallel | None = None,
) -> PartialRollout:
    """Takes what waits further, then new prompts. Waits for the slowest response of them.

    waiting: of the step before; it stays as it is, so that a step which fails can be taken again. seed: the run's.
    ranks: share the generation; they call it together.
    """
    wanted = config.prompts_per_step
    num_begun = 0 if waiting.num_complete >= wanted else wanted
    at = prompts.state()
    taken = tell_apart(prompts.take(num_begun))
    going_on = [begun for begun in waiting.groups if not begun.is_complete]
    calls = [
        *(GroupCall(begun.group.prompt, begun.group.group_size, begun.step, begun.group) for begun in going_on),
        *(GroupCall(prompt, config.group_size, step) for prompt in taken),
    ]
    drawn = await generate_calls(
        engine,
        calls,
        sampling=config.sampling_params(seed),
        max_new_tokens=config.max_new_tokens_per_step,
        ranks=ranks,
    )
    further = dict(zip(((begun.step, begun.place) for begun in going_on), drawn, strict=False))
    groups = [
        *(replace(begun, group=further.get((begun.step, begun.place), begun.group)) for begun in waiting.groups),
        *(WaitingGroup(step, place, group) for place, group in enumerate(drawn[len(going_on) :])),
    ]
    complete = [index for index, begun in enumerate(groups) if begun.is_complete][:wanted]
    left = tuple(begun for index, begun in enumerate(groups) if index not in set(complete))
    still_waited_for = {begun.step for begun in left}
    taken_at = {begun: where for begun, where in {**waiting.taken_at, step: at}.items() if begun in still_waited_for}
    return PartialRollout(
        complete=tuple(groups[index].group for index in complete),
        waiting=WaitingGroups(left, taken_at),
        num_begun=num_begun,
        num_generated_tokens=sum(map(_num_tokens, drawn)) - sum(_num_tokens(begun.group) for begun in going_on),
    )


def _num_tokens(group: RolloutGroup) -> int:
    return sum(group.response_lengths)
