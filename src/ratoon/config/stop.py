"""When a run ends before its last step."""

from pydantic import BaseModel, ConfigDict, Field

from ratoon.types.limits import MAX_STEPS

MIN_CYCLE_TOKENS = 32
"""A response ends in a repetition when at least so many of its last tokens are one cycle."""


class StopConfig(BaseModel):
    """The `[stop]` table: rules that end a run, with a checkpoint and the reason, once they are met."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_useless_steps: int = Field(default=20, ge=0, le=MAX_STEPS)
    """Stop after so many steps in a row that taught nothing: every advantage 0, or no response to train on.
    0 never stops for it."""

    min_entropy: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Stop when the policy's entropy (`entropy_mean`, nats per token) is below this; absent: never."""

    max_kl_old: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Stop when the policy moves further than this within a step (`kl_old_mean`, nats per token); absent: never."""

    max_kl_ref: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Stop when the policy is further than this from the reference model (`kl_ref_mean`, nats per token);
    absent: never."""

    max_repetitive_fraction: float | None = Field(default=None, ge=0, lt=1)
    """Stop when more than this share of a step's responses ends in an endless repetition; absent: never."""

    patience_steps: int = Field(default=5, ge=1, le=MAX_STEPS)
    """Steps in a row in which a bound must be crossed, one step being chance; `max_useless_steps` has its own."""
