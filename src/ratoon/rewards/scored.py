"""Groups with their rewards, and an account of what could not be scored."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ratoon.rewards.messages import Cause
from ratoon.types.rollouts import RolloutGroup

NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailures:
    """Scores that could not be had, each of one response and one component."""

    counts: Mapping[Cause, int] = field(default_factory=dict[Cause, int])
    num_dropped: int = 0
    """Responses taken out of their groups (`reward.on_failure = "drop"`)."""

    num_unreadable: int = 0
    """Scores of 0 because a verifier could not make sense of the response. No failures: such an answer is wrong."""

    examples: tuple[str, ...] = ()
    """A sentence for each of the first few, unreadable ones last."""

    @property
    def num_failures(self) -> int:
        return sum(self.counts.values())

    def __add__(self, other: "RewardFailures") -> "RewardFailures":
        return RewardFailures(
            counts=Counter(self.counts) + Counter(other.counts),
            num_dropped=self.num_dropped + other.num_dropped,
            num_unreadable=self.num_unreadable + other.num_unreadable,
            examples=(*self.examples, *other.examples)[:NUM_EXAMPLES],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroups:
    """What the reward stage makes of groups, in their order."""

    groups: tuple[RolloutGroup, ...]
    """With `rewards_N` and `reward_components`; dropped responses are missing, and a group may have none left."""

    failures: RewardFailures

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name: counts of what failed, and the mean of each component where there are several."""
        failures = self.failures
        found: dict[str, float] = {
            "reward_failures": failures.num_failures,
            **{f"reward_failures_{cause}": count for cause, count in sorted(failures.counts.items()) if count},
            "reward_dropped": failures.num_dropped,
            "reward_unreadable": failures.num_unreadable,
        }
        names = list(dict.fromkeys(name for group in self.groups for name in group.reward_components))
        if len(names) > 1:
            for name in names:
                values = np.concatenate([group.reward_components[name] for group in self.groups])
                found[f"reward_{name}_mean"] = float(values.mean()) if values.size else 0.0
        return found

    def warnings(self) -> dict[str, str]:
        """By a short name of its kind, a sentence about each thing that went wrong."""
        failures, found = self.failures, dict[str, str]()
        example = f"; for example: {failures.examples[0]}" if failures.examples else ""
        if failures.num_failures:
            counts = ", ".join(f"{count} {cause}" for cause, count in sorted(failures.counts.items()) if count)
            fate = f"{failures.num_dropped} responses were dropped" if failures.num_dropped else "they count as 0"
            found["failed rewards"] = f"{failures.num_failures} scores failed ({counts}), {fate}{example}"
        elif failures.num_unreadable:
            found["unreadable responses"] = (
                f"{failures.num_unreadable} responses could not be read by the verifier and score 0{example}"
            )
        return found


def merge(parts: Sequence[ScoredGroups]) -> ScoredGroups:
    """Groups that were scored apart, as if together."""
    failures = RewardFailures()
    for part in parts:
        failures += part.failures
    return ScoredGroups(groups=tuple(group for part in parts for group in part.groups), failures=failures)
