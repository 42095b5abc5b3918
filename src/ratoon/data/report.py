"""What was found in the data before training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """Rows of one source. rows = bad + filtered + duplicates + over-long ones dropped + train + held out."""

    name: str
    num_rows: int
    num_bad: int
    """Dropped by `bad_rows = "drop"`."""

    num_filtered: int
    """Dropped by `filter`."""

    num_duplicates: int
    """Rows whose rendered prompt stands in an earlier row, of this source or another; removed."""

    num_over_long: int
    """Distinct prompts over `max_prompt_tokens`; dropped."""

    num_train: int
    num_heldout: int

    def __post_init__(self) -> None:
        total = self.num_bad + self.num_filtered + self.num_duplicates + self.num_over_long
        total += self.num_train + self.num_heldout
        assert total == self.num_rows, f"the counts of {self.name} account for {total} of {self.num_rows} rows"

    def line(self) -> str:
        """The counts as one line for people."""
        removed = [
            f"{count:,} {what}"
            for count, what in (
                (self.num_bad, "bad rows"),
                (self.num_filtered, "rows by the filter"),
                (self.num_duplicates, "duplicates"),
                (self.num_over_long, "over-long prompts"),
            )
            if count
        ]
        counts = f"{self.name}: {self.num_rows:,} rows"
        if removed:
            counts += f", removed {', '.join(removed[:-1])}{' and ' if removed[:-1] else ''}{removed[-1]}"
        return f"{counts}; {self.num_train:,} to train on, {self.num_heldout:,} held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Tokens of the prompts that are kept, chat template included."""

    minimum: int
    median: float
    p90: int
    """Nine in ten prompts are no longer."""

    p99: int
    maximum: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "PromptLengths":
        """Of at least one prompt. Percentiles are lengths that occur (nearest rank)."""
        ordered = sorted(lengths)
        middle = len(ordered) // 2
        return cls(
            minimum=ordered[0],
            median=ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2,
            p90=ordered[math.ceil(0.9 * len(ordered)) - 1],
            p99=ordered[math.ceil(0.99 * len(ordered)) - 1],
            maximum=ordered[-1],
        )

    def line(self) -> str:
        """The lengths as one line for people."""
        text = f"prompt tokens: {self.minimum:,} to {self.maximum:,}, median {self.median:,g}"
        return text if self.minimum == self.maximum else f"{text}, p90 {self.p90:,}, p99 {self.p99:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Counts, lengths and what looks wrong."""

    sources: tuple[SourceCounts, ...]
    """In the order of the recipe."""

    shares: Mapping[str, float]
    """By source, its part of the prompts trained on; empty where no weights are set."""

    num_conflicts: int
    """Duplicates whose answer differs from that of the row that was kept."""

    num_without_answer: int
    """Kept prompts that have no reference answer."""

    lengths: PromptLengths

    mean_train_tokens: float
    """Prompt tokens of the mean prompt trained on, each source counted by its share."""

    warnings: tuple[str, ...] = ()
    """One sentence each, for a person to judge."""

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def num_duplicates(self) -> int:
        return sum(source.num_duplicates for source in self.sources)

    @property
    def num_over_long(self) -> int:
        return sum(source.num_over_long for source in self.sources)

    @property
    def num_train(self) -> int:
        return sum(source.num_train for source in self.sources)

    @property
    def num_heldout(self) -> int:
        return sum(source.num_heldout for source in self.sources)

    def dedup_ratio(self, *, group_size: int, response_tokens: float) -> float:
        """Logical tokens over rows to expect in training, with responses of `response_tokens` in the mean."""
        return expected_dedup_ratio(self.mean_train_tokens, group_size=group_size, response_tokens=response_tokens)

    def lines(self) -> tuple[str, ...]:
        """The report for people, warnings last."""
        return (*self.count_lines(), *(f"warning: {warning}" for warning in self.warnings))

    def count_lines(self) -> tuple[str, ...]:
        """The report without its warnings."""
        return (*(source.line() for source in self.sources), *self._share_lines(), self.lengths.line())

    def _share_lines(self) -> list[str]:
        """How often each source's prompts come while the one that is slowest to come round is seen once."""
        if not self.shares:
            return []
        rates = {source.name: self.shares[source.name] / source.num_train for source in self.sources}
        slowest = min(rates.values())
        return [
            f"{name}: {self.shares[name]:.1%} of the prompts trained on; each comes {rate / slowest:.3g} times while "
            "every source is seen once"
            for name, rate in rates.items()
        ]


def expected_dedup_ratio(prompt_tokens: float, *, group_size: int, response_tokens: float) -> float:
    """N (P + R) / (P + N R): the tokens of N separate sequences over the rows of one shared prompt and N responses.

    Of many groups, the ratio of their sums is that of their mean lengths.
    """
    P, R, N = prompt_tokens, response_tokens, group_size
    return N * (P + R) / (P + N * R)
