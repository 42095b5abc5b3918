"""The reward stage: groups in, groups with rewards out, whatever the reward functions do."""

# Shape letters: N responses of a group.

import asyncio
import itertools
import os
import pickle
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ratoon.data.rows import cause_of
from ratoon.data.user_function import check_names
from ratoon.rewards.checks import checked_reward
from ratoon.rewards.components import SOFT_OVERLONG, PromptText, place_of
from ratoon.rewards.config import RewardConfig, python_target
from ratoon.rewards.messages import OK, REFUSED, UNREADABLE, Cause, ComponentKind, Orders, Outcome, WorkerCall
from ratoon.rewards.scheduling import Job, Scheduler, SchedulerConfig
from ratoon.rewards.scored import NUM_EXAMPLES, RewardFailures, ScoredGroups
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt, RolloutGroup

_MAX_DEFAULT_WORKERS = 4
_PROMPTS_PER_CHECK = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """Which scores a call gives: of one component, for some responses of one group."""

    component: int
    """Number among all components."""

    group: int
    responses: tuple[int, ...]


class RewardPool:
    """Scores groups in worker processes, as `config` says.

    Making one starts its workers, which load the functions while the run does other things; `check` waits for them.
    `close` ends them, as does the end of the run by any cause. All methods may be called from any thread.
    """

    def __init__(self, config: RewardConfig, *, base_dir: Path, max_response_tokens: int) -> None:
        """base_dir: the recipe's folder, to which Python files are relative. max_response_tokens: of the rollout.

        Raises UserError where these do not fit `config`.
        """
        self.config = config
        self._names = config.names
        self._max_response_tokens = max_response_tokens
        self._ids = itertools.count(1)
        self._specs = config.specs
        for component in config.all_components:
            if component.buffer_tokens is not None and component.buffer_tokens > max_response_tokens:
                raise UserError(
                    f"reward: buffer_tokens = {component.buffer_tokens} is more than "
                    f"rollout.max_response_tokens = {max_response_tokens}; a fifth of it is usual"
                )
        self._worked = [index for index, spec in enumerate(self._specs) if spec.function != SOFT_OVERLONG]
        """Components that workers score."""
        self._scheduler = self._start(base_dir) if self._worked else None

    def _start(self, base_dir: Path) -> Scheduler:
        config = self.config
        targets = [python_target(self._specs[index].function) for index in self._worked]
        memory = config.max_memory_gb
        scheduler = Scheduler(
            SchedulerConfig(
                orders=Orders(
                    specs=tuple(self._specs[index] for index in self._worked),
                    base_dir=str(base_dir.absolute()),
                    timeout_s=config.timeout_s,
                    max_memory_bytes=None if memory is None else int(memory * 1e9),
                ),
                files=tuple(None if target is None else _real_path(base_dir, target[0]) for target in targets),
                num_workers=config.num_workers or default_num_workers(),
                timeout_s=config.timeout_s,
                start_timeout_s=config.start_timeout_s,
            )
        )
        weakref.finalize(self, scheduler.close)
        return scheduler

    def show_output(self, path: Path | None) -> None:
        """What functions print, the first 8 MB of it: appended to `path`, or to standard error where that is None.

        Without this call, it goes nowhere.
        """
        if self._scheduler is not None:
            self._scheduler.output.open(path)

    def check(self, prompts: Sequence[Prompt], columns: Collection[str] | None = None) -> None:
        """Waits until a worker has loaded the functions, and asks them whether they could score these prompts.

        columns: metadata keys that every prompt has (`PromptSplit.columns`), which Python functions may ask for.
        Raises UserError for a function that cannot be loaded or asks for what there is not, and for the first
        prompt that a built-in function could not score.
        """
        if self._scheduler is None:
            return
        kinds = self._scheduler.kinds.result()
        if columns is not None:
            for kind in kinds:
                check_names(kind.label, kind.required, kind.always, columns, "the data")
        calls: list[WorkerCall] = []
        for component, kind in enumerate(kinds):
            if kind.label:
                continue  # a Python function needs columns only
            for start in range(0, len(prompts), _PROMPTS_PER_CHECK):
                some = [_pickled(prompt) for prompt in prompts[start : start + _PROMPTS_PER_CHECK]]
                limit_s = self.config.timeout_s * len(some)
                calls.append(WorkerCall(next(self._ids), component, pickle.dumps(some), (), (), limit_s))
        job = Job(calls, stops_at_failure=False)
        self._scheduler.submit(job)
        for number, call in enumerate(job.future.result().calls):
            ((status, sentence),) = job.outcomes[call.id]
            if status == REFUSED:
                raise UserError(str(sentence))
            if status != OK:
                first = prompts[number * _PROMPTS_PER_CHECK % len(prompts)].id
                raise UserError(
                    f"{self._specs[self._worked[call.component]].key}: asking whether prompt {first!r} or one of those "
                    f"after it can be scored ended with {status}: {sentence}"
                )

    async def score(self, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """Rewards for all responses, which do not depend on how many workers there are.

        Raises UserError where a score fails and `reward.on_failure` is "raise", and, whatever it is, for a prompt that
        lacks what a function needs. Cancelling it takes back the calls that no worker has begun.
        """
        if self._scheduler is None:
            return self._assembled(groups, None, [])
        kinds = await asyncio.wrap_future(self._scheduler.kinds)
        job, places = self._submit(self._scheduler, groups, kinds)
        await asyncio.wrap_future(job.future)
        return self._assembled(groups, job, places)

    def score_now(self, groups: Sequence[RolloutGroup]) -> ScoredGroups:
        """`score` for callers without an event loop; waits."""
        if self._scheduler is None:
            return self._assembled(groups, None, [])
        job, places = self._submit(self._scheduler, groups, self._scheduler.kinds.result())
        job.future.result()
        return self._assembled(groups, job, places)

    def close(self) -> None:
        """Kills the workers and whatever they have started. What is still being scored fails."""
        if self._scheduler is not None:
            self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _submit(
        self, scheduler: Scheduler, groups: Sequence[RolloutGroup], kinds: Sequence[ComponentKind]
    ) -> tuple[Job, list[_Place]]:
        calls: list[WorkerCall] = []
        places: list[_Place] = []
        indices = [self._scored_indices(group) for group in groups]
        prompts = [_pickled(group.prompt) if some else b"" for group, some in zip(groups, indices, strict=True)]
        for component, kind in enumerate(kinds):
            for number, group in enumerate(groups):
                for some in _batches(indices[number], is_batch=kind.is_batch):
                    texts = tuple(group.responses[index].text for index in some)
                    limit_s = self.config.timeout_s * len(some)
                    calls.append(WorkerCall(next(self._ids), component, prompts[number], texts, some, limit_s))
                    places.append(_Place(self._worked[component], number, some))
        job = Job(calls, stops_at_failure=self.config.on_failure == "raise")
        scheduler.submit(job)
        return job, places

    def _scored_indices(self, group: RolloutGroup) -> tuple[int, ...]:
        """Of the responses that workers see."""
        keep_all = self.config.score_truncated
        return tuple(index for index, response in enumerate(group.responses) if keep_all or not response.is_truncated)

    def _assembled(self, groups: Sequence[RolloutGroup], job: Job | None, places: Sequence[_Place]) -> ScoredGroups:
        tally = _Tally(groups, num_components=len(self._specs))
        for place, call in zip(places, () if job is None else job.calls, strict=True):
            for index, outcome in zip(place.responses, (job.outcomes if job else {}).get(call.id, ()), strict=False):
                self._count(tally, groups[place.group], place, index, outcome)
        self._add_length_penalties(tally, groups)
        scored = tuple(self._with_rewards(group, tally, number) for number, group in enumerate(groups))
        num_dropped = sum(before.group_size - after.group_size for before, after in zip(groups, scored, strict=True))
        return ScoredGroups(groups=scored, failures=tally.failures(num_dropped))

    def _count(self, tally: "_Tally", group: RolloutGroup, place: _Place, index: int, outcome: Outcome) -> None:
        status, value = outcome
        if status == OK:
            tally.values[place.component][place.group][index] = value
            return
        if status == UNREADABLE:
            tally.unreadable.append(str(value))
            return
        if status == REFUSED:
            raise UserError(str(value))
        sentence = self._sentence(Cause(status), str(value), group, place, index)
        if self.config.on_failure == "raise":
            raise UserError(f'{sentence} (reward.on_failure = "zero" or "drop" would go on)')
        tally.causes[Cause(status)] += 1
        tally.examples.append(sentence)
        tally.has_failed[place.group][index] = True

    def _sentence(self, cause: Cause, known: str, group: RolloutGroup, place: _Place, index: int) -> str:
        if cause not in (Cause.TIMEOUT, Cause.DIED):
            return known
        where = place_of(self._specs[place.component].function, group.prompt.id, index)
        text = f"{group.responses[index].text[:200]!r}"
        if cause is Cause.DIED:
            return f"{where} is lost: its worker {known}; mend the function for this response: {text}"
        at = f" (it was at {known})" if known else ""
        return (
            f"{where} did not return within reward.timeout_s = {self.config.timeout_s:g} s{at}; "
            f"raise the limit, or mend the function for this response: {text}"
        )

    def _add_length_penalties(self, tally: "_Tally", groups: Sequence[RolloutGroup]) -> None:
        for number, component in enumerate(self.config.all_components):
            if component.buffer_tokens is None:
                continue
            from ratoon.algorithms.shaping import soft_overlong_penalty

            for group_index, group in enumerate(groups):
                tally.values[number][group_index][:] = soft_overlong_penalty(
                    np.asarray(group.response_lengths, np.int64),
                    max_response_tokens=self._max_response_tokens,
                    buffer_tokens=component.buffer_tokens,
                )

    def _with_rewards(self, group: RolloutGroup, tally: "_Tally", number: int) -> RolloutGroup:
        total_N, has_failed_N = np.zeros(group.group_size), tally.has_failed[number]
        for component, values in zip(self.config.all_components, tally.values, strict=True):
            total_N += component.weight * values[number]
        for index, total in enumerate(total_N.tolist()):
            checked_reward(total, f"the weighted sum of rewards of prompt {group.prompt.id!r}, response {index},")
        scored = replace(
            group,
            rewards_N=total_N,
            advantages_N=None,
            reward_components={name: values[number] for name, values in zip(self._names, tally.values, strict=True)},
            score_failed_N=has_failed_N,
        )
        if self.config.on_failure != "drop" or not has_failed_N.any():
            return scored
        return scored.select(np.flatnonzero(~has_failed_N).tolist())


class _Tally:
    """Scores and failures, as they are read off a job."""

    def __init__(self, groups: Sequence[RolloutGroup], *, num_components: int) -> None:
        self.values = [[np.zeros(group.group_size) for group in groups] for _ in range(num_components)]
        """By component and group, [N] float64."""
        self.has_failed = [np.zeros(group.group_size, np.bool_) for group in groups]
        self.causes: Counter[Cause] = Counter()
        self.examples: list[str] = []
        self.unreadable: list[str] = []

    def failures(self, num_dropped: int) -> RewardFailures:
        return RewardFailures(
            counts=dict(self.causes),
            num_dropped=num_dropped,
            num_unreadable=len(self.unreadable),
            examples=(*self.examples, *self.unreadable)[:NUM_EXAMPLES],
        )


def default_num_workers() -> int:
    """One for each CPU that this process may use, 4 at most."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_DEFAULT_WORKERS, usable)


def _batches(indices: tuple[int, ...], *, is_batch: bool) -> list[tuple[int, ...]]:
    """The responses of a group that go into one call: all, if there are any, or each by itself."""
    return [indices] if is_batch and indices else [(index,) for index in indices]


def _pickled(prompt: Prompt) -> bytes:
    side = PromptText(prompt.id, prompt.text, prompt.answer, dict(prompt.metadata))
    try:
        return pickle.dumps(side, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UserError(
            f"the metadata of prompt {prompt.id!r} cannot be sent to a reward worker ({cause_of(error)}); "
            "keep plain values in it: texts, numbers, lists, mappings"
        ) from error


def _real_path(base_dir: Path, file: str) -> str | None:
    """As a worker's stack shows it; None for a path that cannot be had, of which the worker will tell."""
    try:
        return str((base_dir / Path(file).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError):
        return None
