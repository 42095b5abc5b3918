"""What the view is told: a step, and a whole run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step. What a stage does not measure is None, and is not shown."""

    stage: str
    """What the steps belong to: `sft`, `grpo`, ..."""

    step: int
    """Steps done, this one included."""

    num_steps: int
    seconds: float
    """Wall clock of this step."""

    reward_mean: float | None = None
    """Over the step's responses."""

    loss: float | None = None
    logical_tokens_per_s: float | None = None
    """Logical tokens (each response with its prompt) over the update's seconds."""

    computed_tokens_per_s: float | None = None
    """Rows that went through the model over the update's seconds."""

    dedup_ratio: float | None = None
    """Logical tokens over rows computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A whole run, for its final page."""

    run_name: str
    run_dir: Path
    train_command: str
    """What the user typed, overrides included: the same command resumes the run."""

    num_steps_done: int
    num_steps: int
    seconds_by_phase: Mapping[str, float]
    """Where the time went. `update` and `generate` also are the denominators of tokens/s."""

    wall_s: float
    """Of the whole run so far, earlier processes included if known; at least the phases' sum."""

    num_logical_tokens: int
    """Tokens that updates stood for: each response with its own copy of its prompt."""

    num_computed_rows: int
    """Token rows that updates put through the model."""

    num_response_tokens: int
    """Tokens drawn in rollout."""

    reward_before: float | None = None
    """Held-out mean reward before the first update; None if it was not evaluated."""

    reward_after: float | None = None
    """The latest one since, at step `reward_after_step`; None if it was not evaluated again."""

    reward_after_step: int | None = None
    num_heldout_responses: int = 0
    """Denominator of both."""

    memory_peak_gib: float | None = None
    """Measured, of the step that took most; None where the machine does not tell."""

    memory_predicted_gib: float | None = None
    """For that step; None where the model's size is not known."""

    num_failures_by_cause: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rewards of training steps that failed; without those that did not."""

    num_responses_dropped: int = 0
    """Taken out of training steps because their reward failed."""

    checkpoint: Path | None = None
    """The newest one."""

    best_checkpoint: Path | None = None
    """The one with the best held-out reward, where the run keeps it."""

    how_to_go_on: str | None = None
    """What to do about the rule that has ended the run; None where none has."""

    notes: tuple[str, ...] = ()
    """One sentence each: what the reader must know, such as why the loss was 0."""

    @property
    def is_complete(self) -> bool:
        return self.num_steps_done >= self.num_steps

    @property
    def dedup_ratio(self) -> float | None:
        """Logical tokens over rows computed; None before any update."""
        return self.num_logical_tokens / self.num_computed_rows if self.num_computed_rows else None

    @property
    def logical_tokens_per_s(self) -> float | None:
        """Logical tokens over seconds of the phase `update`."""
        return _rate(self.num_logical_tokens, self.seconds_by_phase.get("update", 0.0))

    @property
    def computed_tokens_per_s(self) -> float | None:
        """Rows computed over seconds of the phase `update`."""
        return _rate(self.num_computed_rows, self.seconds_by_phase.get("update", 0.0))

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Response tokens over seconds of the phase `generate`."""
        return _rate(self.num_response_tokens, self.seconds_by_phase.get("generate", 0.0))
