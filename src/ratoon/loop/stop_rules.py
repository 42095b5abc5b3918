"""The rules by which a run ends before its last step, as functions of the steps so far."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratoon.config.stop import StopConfig
from ratoon.loop.diagnosis import StepFacts, useless_cause

EXIT_STOPPED = 3
"""Exit status of a run that a rule has ended."""


@dataclass(frozen=True, slots=True)
class StopReason:
    """Which rule ended the run, and why."""

    rule: str
    """Its key in the recipe, such as `stop.max_useless_steps`."""

    sentence: str
    """What was seen, and what to do about it."""

    @property
    def how_to_go_on(self) -> str:
        off = "0, which turns it off" if self.rule == "stop.max_useless_steps" else "without it"
        return (
            f"To go on from the last checkpoint all the same, run the same command with another --{self.rule}, or {off}"
        )


@dataclass(frozen=True, slots=True)
class StopRules:
    """The rules of `[stop]` that are on."""

    config: StopConfig

    @property
    def num_steps_needed(self) -> int:
        """How many of the last steps the rules look at."""
        return max(self.config.max_useless_steps, self.config.patience_steps)

    def after_step(self, history: Sequence[StepFacts]) -> StopReason | None:
        """The first rule that the steps so far meet, the newest step last; None if the run goes on.

        A pure function of the last `num_steps_needed` steps, so that a resumed run, which reads them from
        metrics.jsonl, stops where an undisturbed one does.
        """
        for rule in (self._useless, self._entropy, self._kl_old, self._kl_ref, self._repetition):
            reason = rule(history)
            if reason is not None:
                return reason
        return None

    def _useless(self, history: Sequence[StepFacts]) -> StopReason | None:
        k = self.config.max_useless_steps
        if k == 0 or len(history) < k:
            return None
        causes = [useless_cause(facts) for facts in history[-k:]]
        known = [cause for cause in causes if cause is not None]
        if len(known) < k:
            return None
        counts = Counter(cause.kind for cause in known)
        named = ", ".join(f"{kind} in {count}" for kind, count in counts.most_common())
        return StopReason(
            "stop.max_useless_steps",
            f"{_steps(k)} taught nothing ({named}). At the last of them {known[-1].sentence}",
        )

    def _entropy(self, history: Sequence[StepFacts]) -> StopReason | None:
        bound = self.config.min_entropy
        if bound is None:
            return None
        seen = self._crossed(history, lambda facts: facts.entropy_mean, lambda value: value < bound)
        if seen is None:
            return None
        return StopReason(
            "stop.min_entropy",
            f"the policy's entropy has collapsed: entropy_mean was below {bound:g} nats per token in "
            f"{_steps(len(seen))} ({_range(seen)}); lower trainer.learning_rate, set algorithm.entropy_coefficient, "
            "or go back to an earlier checkpoint",
        )

    def _kl_old(self, history: Sequence[StepFacts]) -> StopReason | None:
        return self._kl(
            history, "max_kl_old", self.config.max_kl_old, lambda facts: facts.kl_old_mean, "its own start of the step"
        )

    def _kl_ref(self, history: Sequence[StepFacts]) -> StopReason | None:
        return self._kl(
            history, "max_kl_ref", self.config.max_kl_ref, lambda facts: facts.kl_ref_mean, "the reference model"
        )

    def _kl(
        self,
        history: Sequence[StepFacts],
        key: str,
        bound: float | None,
        measure: Callable[[StepFacts], float | None],
        whom: str,
    ) -> StopReason | None:
        if bound is None:
            return None
        seen = self._crossed(history, measure, lambda value: value > bound)
        if seen is None:
            return None
        return StopReason(
            f"stop.{key}",
            f"the policy has run away from {whom}: {key.removeprefix('max_')}_mean was above {bound:g} nats per token "
            f"in {_steps(len(seen))} ({_range(seen)}); lower trainer.learning_rate, or hold the policy closer",
        )

    def _repetition(self, history: Sequence[StepFacts]) -> StopReason | None:
        bound = self.config.max_repetitive_fraction
        if bound is None:
            return None
        seen = self._crossed(history, _repetitive_fraction, lambda value: value > bound)
        if seen is None:
            return None
        return StopReason(
            "stop.max_repetitive_fraction",
            f"more than {bound:.0%} of the responses repeated themselves to the end in {_steps(len(seen))} "
            f"({_range(seen)}); lower trainer.learning_rate, or let endless responses score less",
        )

    def _crossed(
        self,
        history: Sequence[StepFacts],
        measure: Callable[[StepFacts], float | None],
        is_beyond: Callable[[float], bool],
    ) -> tuple[float, ...] | None:
        """The measures of the last `patience_steps` steps if each is known and beyond its bound, else None."""
        k = self.config.patience_steps
        values = [measure(facts) for facts in history[-k:]]
        seen = tuple(value for value in values if value is not None and is_beyond(value))
        return seen if len(seen) == k else None


def _repetitive_fraction(facts: StepFacts) -> float | None:
    return facts.num_repetitive / facts.num_responses if facts.num_responses else None


def _steps(count: int) -> str:
    return f"the last {count} steps" if count > 1 else "the last step"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"
