"""What is degenerate in a step's responses, counted, and said in words when it matters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.algorithms import are_equal
from ratoon.config.stop import MIN_CYCLE_TOKENS
from ratoon.metrics.rows import MetricValue
from ratoon.types.rollouts import FinishReason, RolloutGroup

_MOSTLY = 0.9
"""Share of a step from which a degenerate case is worth a warning."""

_NEAR_ZERO = 1e-4
"""A loss below it is read as 0 by people."""

_ZERO_ADVANTAGE = 1e-9
"""What rounding leaves of the advantage of equal rewards, and far below any other."""

_MIN_REPEATS = 4
_MAX_CYCLE_TOKENS = 256


_OVER_RESPONSES = ("reward_mean", "reward_std", "response_tokens_mean", "staleness_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """Counts over one step's groups and responses."""

    num_groups: int
    """Groups with at least one response."""

    num_responses: int
    num_lost_responses: int
    """Responses that were asked for and are not there: the engine gave none, or their reward failed and was dropped."""

    num_equal_reward_groups: int
    """Groups whose rewards are all equal: nothing to prefer in them."""

    num_zero_advantages: int
    """Responses whose advantage is 0: they teach nothing."""

    num_truncated: int
    """Responses that the token budget ended."""

    num_repetitive: int
    """Truncated responses that end in an endless repetition (`ends_in_cycle`)."""

    num_empty: int
    """Responses without text: nothing but EOS, or no token at all."""

    reward_mean: float
    reward_std: float
    response_tokens_mean: float
    """Over all responses, truncated and masked ones included."""

    staleness_max: int
    """Policy versions between the oldest token and the weights it trains."""

    staleness_mean: float
    """The same, over all tokens of which the version is known."""

    @classmethod
    def of(
        cls, groups: Sequence[RolloutGroup], policy_version: int, *, num_responses_asked: int | None = None
    ) -> "StepDiagnosis":
        """Counts over scored groups, of which some may have lost responses, or all of them.

        num_responses_asked: how many the step asked for; None where none can be lost.
        Where advantages are not known, a response of a group of equal rewards counts as one of advantage 0.
        """
        groups = [group for group in groups if group.group_size]
        responses = [response for group in groups for response in group.responses]
        rewards = np.concatenate([group.rewards_N for group in groups if group.rewards_N is not None] or [np.zeros(0)])
        known = [response.policy_versions for response in responses if response.policy_versions is not None]
        staleness = policy_version - np.concatenate([np.empty(0, np.int64), *known])
        return cls(
            num_groups=len(groups),
            num_responses=len(responses),
            num_lost_responses=0 if num_responses_asked is None else num_responses_asked - len(responses),
            num_equal_reward_groups=sum(_has_equal_rewards(group) for group in groups),
            num_zero_advantages=sum(_num_zero_advantages(group) for group in groups),
            num_truncated=sum(response.is_truncated for response in responses),
            num_repetitive=sum(response.is_truncated and ends_in_cycle(response.token_ids) for response in responses),
            num_empty=sum(
                response.num_tokens == 0 or (response.num_tokens == 1 and response.finish_reason is FinishReason.EOS)
                for response in responses
            ),
            reward_mean=float(rewards.mean()) if rewards.size else 0.0,
            reward_std=float(rewards.std()) if rewards.size else 0.0,
            response_tokens_mean=float(np.mean([response.num_tokens for response in responses])) if responses else 0.0,
            staleness_max=int(staleness.max(initial=0)),
            staleness_mean=float(staleness.mean()) if staleness.size else 0.0,
        )

    def metrics(self) -> dict[str, MetricValue]:
        """For metrics.jsonl. Means over no response are left out: a 0 would be read as a reward."""
        found = asdict(self)
        if self.num_responses:
            return found
        return {name: value for name, value in found.items() if name not in _OVER_RESPONSES}

    def warnings(self, facts: "StepFacts | None" = None) -> dict[str, str]:
        """For each degenerate case that rules the step, by its short name, one sentence.

        facts: of this step, once it is trained and logged: they also tell why a loss is 0.
        """
        found: dict[str, str] = {}
        N = self.num_responses
        if N and self.num_truncated >= _MOSTLY * N:
            found["cut responses"] = (
                f"{self.num_truncated} of {N} responses were cut by rollout.max_response_tokens before the model ended "
                "them; raise it, or check that the model knows its EOS token (model.eos_token)"
            )
        if N and self.num_empty >= _MOSTLY * N:
            found["empty responses"] = (
                f"{self.num_empty} of {N} responses were empty; check the chat template and the prompt"
            )
        if N and self.num_repetitive >= _MOSTLY * N:
            found["endless repetition"] = (
                f"{self.num_repetitive} of {N} responses repeat themselves to the end; lower trainer.learning_rate, or "
                "raise rollout.temperature"
            )
        if N and self.num_lost_responses:
            found["lost responses"] = (
                f"{self.num_lost_responses} of {N + self.num_lost_responses} responses were lost before training: the "
                "engine gave none, or their reward failed and was dropped"
            )
        cause = explain_loss(facts or StepFacts.of({**asdict(self), "num_loss_tokens": None}))
        if cause is not None and not cause.is_normal:
            found[cause.kind] = cause.sentence
        return found

    def staleness_warnings(self) -> dict[str, str]:
        """For a loss that does not weigh tokens by what drew them (`algorithm.mismatch_correction`)."""
        if self.staleness_max <= 0:
            return {}
        return {
            "stale tokens": (
                f"tokens of the step were drawn up to {self.staleness_max} policy versions before the weights they "
                f"train ({self.staleness_mean:.2f} on average), and the loss takes them for the present policy's; set "
                "algorithm.mismatch_correction (token-tis is usual), which weighs them by both probabilities"
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step's row in metrics.jsonl says about why it taught nothing, and about when to stop.

    It is read from the row in the run itself too, so that a resumed run sees what the undisturbed one saw.
    What the row lacks, or holds as null, is None.
    """

    num_groups: int
    num_responses: int
    num_lost_responses: int
    num_equal_reward_groups: int
    num_zero_advantages: int
    num_truncated: int
    num_repetitive: int
    num_empty: int
    num_waiting_groups: int
    reward_mean: float | None
    num_updates: int | None
    num_loss_tokens: int | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    entropy_mean: float | None
    kl_old_mean: float | None
    kl_ref_mean: float | None

    @classmethod
    def of(cls, values: Mapping[str, MetricValue]) -> "StepFacts":
        """From the values of a row of phase `train`; without `num_loss_tokens`, of a step that had none to train on."""
        counts = {name: _count(values, name) or 0 for name in _COUNTS}
        if "num_zero_advantages" not in values:  # rows of version 0.1
            is_useless = counts["num_equal_reward_groups"] == counts["num_groups"]
            counts["num_zero_advantages"] = counts["num_responses"] if is_useless else 0
        num_loss_tokens = _count(values, "num_loss_tokens") if "num_loss_tokens" in values else 0
        # Over no token, a mean is written as 0, which is no measure.
        of_tokens: Mapping[str, MetricValue] = {} if num_loss_tokens == 0 else values
        return cls(
            **counts,
            num_updates=_count(values, "num_updates"),
            num_loss_tokens=num_loss_tokens,
            reward_mean=_number(values, "reward_mean"),
            loss=_number(values, "loss"),
            grad_norm=_number(values, "grad_norm"),
            learning_rate=_number(values, "learning_rate"),
            entropy_mean=_number(of_tokens, "entropy_mean"),
            kl_old_mean=_number(of_tokens, "kl_old_mean"),
            kl_ref_mean=_number(of_tokens, "kl_ref_mean"),
        )


_COUNTS = (
    "num_groups",
    "num_responses",
    "num_lost_responses",
    "num_equal_reward_groups",
    "num_zero_advantages",
    "num_truncated",
    "num_repetitive",
    "num_empty",
    "num_waiting_groups",
)


@dataclass(frozen=True, slots=True)
class LossCause:
    """Why a loss is 0, or why a step taught nothing."""

    kind: str
    """Short, the same for every step of this cause."""

    sentence: str
    is_normal: bool = False
    """Nothing is wrong: the loss is 0 and the gradient is not."""


def explain_loss(facts: StepFacts) -> LossCause | None:
    """The first cause that holds; None where the loss is not 0 and the step taught something."""
    cause = useless_cause(facts)
    if cause is not None:
        return cause
    if _only_waits(facts):
        return LossCause(
            "no group complete",
            f"no group is complete yet: all {facts.num_waiting_groups} go on in the next step, for "
            "rollout.max_new_tokens_per_step is less than a response takes, so the loss is 0 and the weights stay",
            is_normal=True,
        )
    if facts.learning_rate == 0:
        return LossCause(
            "learning rate 0",
            "the learning rate of this step is 0, so the weights did not move; look at trainer.learning_rate, "
            "trainer.schedule and trainer.warmup_steps",
        )
    if facts.grad_norm == 0:
        return LossCause(
            "gradient 0",
            "the gradient is 0 although advantages are not: every token was clipped or masked, or no parameter that "
            "is trained takes part; look at clipped_fraction in metrics.jsonl",
        )
    if facts.num_updates == 1 and facts.loss is not None and abs(facts.loss) < _NEAR_ZERO and facts.grad_norm:
        return LossCause(
            "ratio 1",
            "the loss prints as 0, which is normal: with one update a step every ratio is 1 and advantages are "
            f"centred, so its value vanishes and its gradient (norm {facts.grad_norm:.3g}) does not; watch the reward",
            is_normal=True,
        )
    return None


def useless_cause(facts: StepFacts) -> LossCause | None:
    """Why a step taught nothing; None if it had something to teach, or only drew what later steps train on."""
    N = facts.num_responses
    if _only_waits(facts):
        return None
    if N == 0:
        return LossCause(
            "no responses",
            f"no response was left to train on: {facts.num_lost_responses} were lost, because the engine gave none, or "
            "their reward failed and was dropped; look at the warnings about rewards, and at reward.function",
        )
    if facts.num_loss_tokens == 0:
        return _without_loss_tokens(facts)
    if facts.num_zero_advantages < N:
        return None
    nothing = "so the policy loss is 0 and nothing was learned"
    mean = "" if facts.reward_mean is None else f" (mean {facts.reward_mean:.3g})"
    # A recipe that asks for one response a prompt compares them over the step, where equal rewards are the cause.
    if facts.num_groups == N and facts.num_lost_responses:
        return LossCause(
            "groups of one",
            f"every group had one response, which has nothing to be compared with, {nothing}; "
            "raise rollout.group_size, or mend what loses the others",
        )
    if facts.num_truncated == N:
        return LossCause(
            "no response ended",
            f"no response ended by itself: all {N} were cut by rollout.max_response_tokens, and their rewards were "
            f"equal{mean}, {nothing}; raise it, or check that the model knows its EOS token (model.eos_token)",
        )
    if facts.num_empty == N:
        return LossCause(
            "only empty responses",
            f"all {N} responses were empty, and their rewards were equal{mean}, {nothing}; "
            "check the chat template and the prompt",
        )
    which = "the step's only group had equal rewards" if facts.num_groups == 1 else "every group's rewards were equal"
    more_prompts = "raise rollout.prompts_per_step, " if facts.num_groups == 1 else ""
    is_solved = facts.reward_mean is not None and math.isclose(facts.reward_mean, 1.0)  # most rewards end there
    prompts = (
        "if 1 is the best there is, the prompts are solved: use harder ones"
        if is_solved
        else ("use easier or harder prompts, a larger rollout.group_size, or a finer reward")
    )
    return LossCause("equal rewards", f"{which}{mean}, {nothing}; {more_prompts}{prompts}")


def _only_waits(facts: StepFacts) -> bool:
    """Under partial rollouts, whether the step had nothing to train on because no group is complete yet."""
    return facts.num_responses == 0 and facts.num_lost_responses == 0 and facts.num_waiting_groups > 0


def _without_loss_tokens(facts: StepFacts) -> LossCause:
    N = facts.num_responses
    if facts.num_truncated == N:
        return LossCause(
            "all masked",
            f"all {N} responses were cut by rollout.max_response_tokens and are masked out of the loss, which is 0: "
            "nothing was learned; raise rollout.max_response_tokens, or train on truncated responses",
        )
    return LossCause(
        "no loss tokens",
        f"no response token was trained on, so the loss is 0: of {N} responses {facts.num_empty} were empty and "
        f"{facts.num_truncated} cut by rollout.max_response_tokens; check the chat template, and what masks tokens",
    )


def _number(values: Mapping[str, MetricValue], name: str) -> float | None:
    """Infinities too: a KL that has run away is beyond any bound."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else None


def _count(values: Mapping[str, MetricValue], name: str) -> int | None:
    value = _number(values, name)
    return None if value is None or math.isinf(value) else int(value)


def ends_in_cycle(token_ids: NDArray[np.int64]) -> bool:
    """Whether a response ends in one cycle of tokens said over and over.

    token_ids: [R] int64. The cycle must fill the last `MIN_CYCLE_TOKENS` tokens, and stand there at least 4 times;
    it has at most 256 tokens. Exact: a repetition with the least change in it is none.
    """
    num_tokens = token_ids.size
    if num_tokens < MIN_CYCLE_TOKENS:
        return False
    longest = min(_MAX_CYCLE_TOKENS, num_tokens // _MIN_REPEATS)
    # A cycle of p tokens has the last token also p places earlier: few p are left to try.
    before_last = token_ids[-1 - longest : -1][::-1]
    for period in (np.flatnonzero(before_last == token_ids[-1]) + 1).tolist():
        tail = token_ids[-max(MIN_CYCLE_TOKENS, _MIN_REPEATS * period) :]
        if np.array_equal(tail[period:], tail[:-period]):
            return True
    return False


def _has_equal_rewards(group: RolloutGroup) -> bool:
    return group.rewards_N is not None and are_equal(group.rewards_N)


def _num_zero_advantages(group: RolloutGroup) -> int:
    if group.advantages_N is not None:
        return int((np.abs(group.advantages_N) <= _ZERO_ADVANTAGE).sum())
    return group.group_size if _has_equal_rewards(group) else 0
