"""Settings of the planner."""

from pydantic import BaseModel, ConfigDict, Field

from ratoon.types.limits import MAX_TOKENS


class PlannerConfig(BaseModel):
    """How a step is cut into forward passes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_rows_per_microbatch: int = Field(default=32_768, ge=1, le=MAX_TOKENS)
    """Token slots in one forward pass of one process, or of the `trainer.sequence_parallel` processes that make it
    together; padding included, a shared prompt counts once."""

    share_prompts: bool = True
    """Store each prompt once for all its responses in a microbatch; false repeats it for every response (for
    comparison: same loss, more work)."""
