"""What was found in the data before training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Counts of one source. rows = duplicates + dropped + train + held out."""

    source: str

    num_rows: int
    num_duplicates: int
    """Rows whose rendered prompt stands in an earlier row; removed."""

    num_conflicts: int
    """Duplicates whose answer differs from that of the row that was kept."""

    num_over_long: int
    """Distinct prompts over `max_prompt_tokens`."""

    num_dropped: int
    """Distinct prompts removed by a declared rule: so far the over-long ones."""

    num_without_answer: int
    """Kept prompts that have no reference answer."""

    num_train: int
    num_heldout: int

    min_prompt_tokens: int
    """Over the kept prompts, as are median and maximum."""

    median_prompt_tokens: float
    max_prompt_tokens: int

    warnings: tuple[str, ...] = ()
    """One sentence each, for a person to judge."""

    def __post_init__(self) -> None:
        total = self.num_duplicates + self.num_dropped + self.num_train + self.num_heldout
        assert total == self.num_rows, f"report accounts for {total} of {self.num_rows} rows"

    def lines(self) -> tuple[str, ...]:
        """The report for people, warnings last."""
        removed = [
            f"{count:,} {what}"
            for count, what in ((self.num_duplicates, "duplicates"), (self.num_dropped, "over-long prompts"))
            if count
        ]
        counts = f"{self.source}: {self.num_rows:,} rows"
        if removed:
            counts += f", removed {' and '.join(removed)}"
        counts += f"; {self.num_train:,} to train on, {self.num_heldout:,} held out"
        lengths = (
            f"prompt tokens: {self.min_prompt_tokens:,} to {self.max_prompt_tokens:,}, "
            f"median {self.median_prompt_tokens:,g}"
        )
        return (counts, lengths, *(f"warning: {warning}" for warning in self.warnings))
